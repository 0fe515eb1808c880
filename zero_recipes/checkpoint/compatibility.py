"""Whether a run fits the checkpoint that it is to go on from, before data and weights are loaded.

A checkpoint holds what was made with the run's values: Adam's states, the scheduler's base rates, the order of the
rows. transformers and DeepSpeed mix them with other values silently.
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

# other values of the first are another training, the second may be raised, the third are speed or rounding: a warning
DECIDES, LENGTH, ROUNDING = (tuple(tables()["resume"][kind]) for kind in ("decides", "length", "rounding"))
BLOCKS = ("optimizer", "scheduler", "gradient_clipping")  # of a ds_config: they count instead of the recipe's keys


def recipe_facts(settings: Settings, strategy: Strategy) -> dict[str, Any]:
    """The part of a manifest that another run is compared with, as JSON."""
    values = settings.as_dict()
    facts = {key: values[key] for key in (*DECIDES, *LENGTH, *ROUNDING) if key in values}
    raw = strategy.ds_config.raw if strategy.ds_config is not None else {}
    facts |= {f"the ds_config's {block}": raw.get(block) for block in BLOCKS}
    facts["accelerator_config"] = _accelerator_config(settings)
    return json.loads(json.dumps(facts, default=lambda value: getattr(value, "value", str(value))))


def fit_findings(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What of a run does not fit the checkpoint. One without a manifest, named by its path, cannot be compared."""
    if strategy.ds.on_nvme:
        yield finding("ZR719", name=strategy.name, checkpoint=checkpoint)
    dispatches = _accelerator_config(settings)["dispatch_batches"]
    if dispatches and strategy.world_size > 1 and not settings.dataset_streaming:  # TRL turns it off for a stream
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
    order = str(settings.train_sampling_strategy)
    keys = [f"train_sampling_strategy: {order}"] if order in ("group_by_length", "batch_rebalance") else []
    keys += ["dataloader_drop_last: true"] if settings.dataloader_drop_last else []
    if keys and strategy.world_size != old_world:
        here = {"world_size": strategy.world_size, "old_world": old_world}
        yield finding("ZR714", key=" and ".join(keys), checkpoint=checkpoint, **here)
    there = written["micro_batch_size"] * written["gradient_accumulation_steps"] * written["world_size"]
    here = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * strategy.world_size
    if there != here:
        yield finding("ZR722", checkpoint=checkpoint, there=there, here=here)
    yield from _recipe(checkpoint, written.get("recipe", {}), recipe_facts(settings, strategy))


def refuse_other_data(checkpoint: str | None, data_sha256: str) -> None:
    """Refuse rows that are not those of the checkpoint. `data_sha256`: data.prepare.Prepared's."""
    written = read_manifest(Path(checkpoint)) if checkpoint else None
    then = (written or {}).get("data_sha256") or data_sha256
    if then != data_sha256:
        raise refusal("ZR727", checkpoint=checkpoint, old=then, new=data_sha256)


def _missing_states(folder: Path, strategy: Strategy) -> Iterator[Finding]:
    """Files that a resume would go on without: transformers and DeepSpeed begin with fresh states.

    transformers 5.23, trainer.py `_load_optimizer_and_scheduler` loads neither where one is missing; DeepSpeed 0.19.8,
    runtime/engine.py `load_checkpoint` keeps the fresh optimizer. A schedule of DeepSpeed's has no scheduler.pt.
    """
    own_schedule = strategy.ds_config is not None and strategy.ds_config.raw.get("scheduler") is not None
    wanted = {} if own_schedule else {"scheduler.pt": 1}
    if strategy.zero_stage:
        wanted["global_step*/*_optim_states.pt"] = strategy.world_size
    else:
        wanted["global_step*/*_model_states.pt" if strategy.is_deepspeed else "optimizer*"] = 1
    if missing := [pattern for pattern, count in wanted.items() if len(list(folder.glob(pattern))) < count]:
        yield finding("ZR769", checkpoint=folder, missing=", ".join(missing))


def needs_reshard(written: Mapping | None, strategy: Strategy) -> bool:
    """Whether the checkpoint can be gone on from once `zero-recipes reshard` has spread it over these processes."""
    alike = bool(written and strategy.zero_stage) and written.get("strategy") == strategy.name
    return alike and written["world_size"] != strategy.world_size


def _ranks(checkpoint: str, written: Mapping, strategy: Strategy) -> Iterator[Finding]:
    there = (written["zero_stage"], written["world_size"], written["strategy"] == "fsdp2")
    here = (strategy.zero_stage, strategy.world_size, strategy.is_fsdp)
    old, new = written["strategy"], strategy.name
    if needs_reshard(written, strategy):
        yield finding("ZR882", checkpoint=checkpoint, old=written["world_size"], world_size=strategy.world_size)
    elif {old, new} <= {"ddp", "single"} or old == new == "fsdp2":
        if there != here:
            yield finding("ZR884", checkpoint=checkpoint, old=written["world_size"], world_size=strategy.world_size)
    elif there != here:
        yield finding(
            "ZR720",
            checkpoint=checkpoint,
            old=f"{old} on {written['world_size']}",
            new=f"{new} on {strategy.world_size}",
            world_size=strategy.world_size,
        )
    elif old != new:
        level = "error" if "_offload" in new else "warning"
        yield finding("ZR721", checkpoint=checkpoint, strategy=old, name=new, level=level)


def _recipe(checkpoint: str, then: Mapping, now: Mapping) -> Iterator[Finding]:
    changed = [key for key in then if then[key] != now.get(key)]
    rounding = list(ROUNDING)
    if now["lr_scheduler_type"] not in ("constant", "constant_with_warmup"):
        rounding += LENGTH
    if keys := [key for key in changed if key not in (*LENGTH, *ROUNDING)]:
        yield finding("ZR723", checkpoint=checkpoint, then=_listed(keys, then), now=_listed(keys, now))
    if keys := [key for key in changed if key in rounding]:
        yield finding("ZR724", checkpoint=checkpoint, then=_listed(keys, then), now=_listed(keys, now))


def _listed(keys: list[str], values: Mapping) -> str:
    return ", ".join(f"{key} {values.get(key)}" for key in keys)


def _resharded(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What would make a run from a resharded checkpoint, or from one that will be, another one than was saved."""
    if strategy.zero_stage not in (1, 2, 3):
        yield finding("ZR712", name=strategy.name, checkpoint=checkpoint)
        return
    config = strategy.ds_config
    round_robin = strategy.zero_stage != 3 and config.zero.get("round_robin_gradients")
    if round_robin or (strategy.zero_stage == 1 and config.grad_accum_dtype is not None):
        key = "round_robin_gradients" if round_robin else "data_types.grad_accum_dtype at stage 1"
        yield finding("ZR715", key=key, checkpoint=checkpoint)
    if config.bf16_masters and is_resharded(checkpoint) and read_states_index(checkpoint)["states"] == "fp32":
        yield finding("ZR289", checkpoint=checkpoint, zero_stage=strategy.zero_stage)
    best = json.loads((Path(checkpoint) / STATE).read_text()).get("best_model_checkpoint")
    if settings.load_best_model_at_end and best is not None:
        yield finding("ZR717", best=best)


def _accelerator_config(settings: Settings) -> dict[str, Any]:
    """All its values, defaults included, but `non_blocking`, which is speed."""
    value = settings.accelerator_config
    values = AcceleratorConfig().to_dict() | ({"file": value} if isinstance(value, str) else value or {})
    return {key: each for key, each in values.items() if key != "non_blocking"}
