"""Whether a run fits the checkpoint that it resumes from.

A checkpoint holds what was made with its run's values: Adam's states, the scheduler's base rates, the rows' order.
transformers and DeepSpeed silently mix them with other values.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

from zero_recipes.checkpoint.save import STATE, is_resharded, read_manifest, read_states_index
from zero_recipes.config.keys import tables
from zero_recipes.config.recipe import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding, refusal

_KEYS = tables()["resume"]
DECIDES = tuple(_KEYS["decides"])  # with other values it is another training
LENGTH = tuple(_KEYS["length"])  # may be raised
ROUNDING = tuple(_KEYS["rounding"])  # speed or rounding: a warning
BLOCKS = ("optimizer", "scheduler", "gradient_clipping")  # of a ds_config: they replace the recipe's keys


def recipe_facts(settings: Settings, strategy: Strategy) -> dict[str, Any]:
    """What a manifest keeps for comparison with another run, as JSON."""
    values = settings.as_dict()
    facts = {key: values[key] for key in (*DECIDES, *LENGTH, *ROUNDING) if key in values}
    for block in BLOCKS:
        facts[f"the ds_config's {block}"] = strategy.ds.raw.get(block)
    facts["accelerator_config"] = _accelerator_config(settings)
    return json.loads(json.dumps(facts, default=lambda value: getattr(value, "value", str(value))))


def fit_findings(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """Without a manifest (named by its path) nothing is compared."""
    if strategy.ds.on_nvme:
        yield finding("ZR719", name=strategy.name, checkpoint=checkpoint)
    dispatches = _accelerator_config(settings)["dispatch_batches"]
    if dispatches and strategy.world_size > 1 and not settings.streams:  # TRL turns it off for a stream
        yield finding("ZR771", world_size=strategy.world_size, checkpoint=checkpoint)
    written = read_manifest(Path(checkpoint))
    if written is None:
        yield finding("ZR718", checkpoint=checkpoint)
        yield from _missing_states(Path(checkpoint), strategy)
        return
    old_world = written["world_size"]
    if is_resharded(checkpoint):
        old_world = read_states_index(checkpoint)["source"]["world_size"]
    else:
        yield from _ranks(checkpoint, written, strategy)
    if is_resharded(checkpoint) or needs_reshard(written, strategy):
        yield from _resharded(checkpoint, settings, strategy)
    keys = " and ".join(_order_by_world(settings))
    world_size = strategy.world_size
    if keys and world_size != old_world:
        yield finding("ZR714", key=keys, checkpoint=checkpoint, world_size=world_size, old_world=old_world)
    there = written["micro_batch_size"] * written["gradient_accumulation_steps"] * written["world_size"]
    here = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * world_size
    if there != here:
        yield finding("ZR722", checkpoint=checkpoint, there=there, here=here)
    yield from _recipe(checkpoint, written.get("recipe", {}), recipe_facts(settings, strategy))


def _order_by_world(settings: Settings) -> Iterator[str]:
    """Settings under which the rows' order depends on the number of processes."""
    order = str(settings.train_sampling_strategy)
    if order in ("group_by_length", "batch_rebalance"):
        yield f"train_sampling_strategy: {order}"
    if settings.dataloader_drop_last:
        yield "dataloader_drop_last: true"


def refuse_other_data(checkpoint: str | None, data_sha256: str) -> None:
    if checkpoint is None:
        return
    written = read_manifest(Path(checkpoint)) or {}
    then = written.get("data_sha256")
    if then and then != data_sha256:
        raise refusal("ZR727", checkpoint=checkpoint, old=then, new=data_sha256)


def _missing_states(folder: Path, strategy: Strategy) -> Iterator[Finding]:
    """Files without which a resume would go on with fresh states.

    transformers 5.23, trainer.py `_load_optimizer_and_scheduler` loads neither where one is missing.
    DeepSpeed 0.19.8, runtime/engine.py `load_checkpoint` keeps the fresh optimizer.
    """
    wanted = {}
    if strategy.ds.raw.get("scheduler") is None:  # DeepSpeed's schedules have no such file
        wanted["scheduler.pt"] = 1
    if strategy.zero_stage:
        wanted["global_step*/*_optim_states.pt"] = strategy.world_size
    elif strategy.is_deepspeed:
        wanted["global_step*/*_model_states.pt"] = 1
    else:
        wanted["optimizer*"] = 1
    missing = [pattern for pattern, count in wanted.items() if len(list(folder.glob(pattern))) < count]
    if missing:
        yield finding("ZR769", checkpoint=folder, missing=", ".join(missing))


def needs_reshard(written: Mapping | None, strategy: Strategy) -> bool:
    """Whether `zero-recipes reshard` has to spread it over these processes."""
    if written is None or not strategy.zero_stage or written.get("strategy") != strategy.name:
        return False
    return written["world_size"] != strategy.world_size


def _ranks(checkpoint: str, written: Mapping, strategy: Strategy) -> Iterator[Finding]:
    old = written["strategy"]
    new = strategy.name
    old_world = written["world_size"]
    world_size = strategy.world_size
    there = (written["zero_stage"], old_world, old == "fsdp2")
    here = (strategy.zero_stage, world_size, strategy.is_fsdp)
    if needs_reshard(written, strategy):
        yield finding("ZR882", checkpoint=checkpoint, old=old_world, world_size=world_size)
    elif {old, new} <= {"ddp", "single"} or old == new == "fsdp2":
        if there != here:
            yield finding("ZR884", checkpoint=checkpoint, old=old_world, world_size=world_size)
    elif there != here:
        yield finding(
            "ZR720",
            checkpoint=checkpoint,
            old=f"{old} on {old_world}",
            new=f"{new} on {world_size}",
            world_size=world_size,
        )
    elif old != new:
        level = "error" if "_offload" in new else "warning"
        yield finding("ZR721", checkpoint=checkpoint, strategy=old, name=new, level=level)


def _recipe(checkpoint: str, then: Mapping, now: Mapping) -> Iterator[Finding]:
    by_length = now["lr_scheduler_type"] not in ("constant", "constant_with_warmup")
    deciding = []
    rounding = []
    for key, value in then.items():
        if value == now.get(key):
            continue
        if key not in (*LENGTH, *ROUNDING):
            deciding.append(key)
        elif key in ROUNDING or by_length:
            rounding.append(key)
    if deciding:
        yield finding("ZR723", checkpoint=checkpoint, then=_listed(deciding, then), now=_listed(deciding, now))
    if rounding:
        yield finding("ZR724", checkpoint=checkpoint, then=_listed(rounding, then), now=_listed(rounding, now))


def _listed(keys: list[str], values: Mapping) -> str:
    return ", ".join(f"{key} {values.get(key)}" for key in keys)


def _resharded(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What would make it another run."""
    if strategy.zero_stage not in (1, 2, 3):
        yield finding("ZR712", name=strategy.name, checkpoint=checkpoint)
        return
    config = strategy.ds_config
    key = None
    if strategy.zero_stage != 3 and config.zero.get("round_robin_gradients"):
        key = "round_robin_gradients"
    elif strategy.zero_stage == 1 and config.grad_accum_dtype is not None:
        key = "data_types.grad_accum_dtype at stage 1"
    if key is not None:
        yield finding("ZR715", key=key, checkpoint=checkpoint)
    if config.bf16_masters and is_resharded(checkpoint) and read_states_index(checkpoint)["states"] == "fp32":
        yield finding("ZR289", checkpoint=checkpoint, zero_stage=strategy.zero_stage)
    best = json.loads((Path(checkpoint) / STATE).read_text()).get("best_model_checkpoint")
    if settings.load_best_model_at_end and best is not None:
        yield finding("ZR717", best=best)


def _accelerator_config(settings: Settings) -> dict[str, Any]:
    """All its values, defaults included, but `non_blocking`, which is speed."""
    own = settings.accelerator_config or {}
    if isinstance(own, str):
        own = {"file": own}
    values = AcceleratorConfig().to_dict() | own
    values.pop("non_blocking", None)
    return values
