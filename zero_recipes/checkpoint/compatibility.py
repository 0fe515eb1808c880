"""Whether a run fits the checkpoint that it is to go on from, before data and weights are loaded.

A checkpoint holds what was made with the run's values: Adam's states, the scheduler's base rates, the order of the
rows. transformers and DeepSpeed mix them with other values silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.trainer_pt_utils import AcceleratorConfig

from zero_recipes.checkpoint.save import STATE, is_resharded, read_manifest, read_states_index
from zero_recipes.config.keys import tables
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding, refusal
from zero_recipes.core.host import library_versions

# other values of the first are another training, the second may be raised, the third are speed or rounding: a warning
DECIDES, LENGTH, ROUNDING = (tuple(tables()["resume"][kind]) for kind in ("decides", "length", "rounding"))
BLOCKS = ("optimizer", "scheduler", "gradient_clipping")  # of a ds_config: they count instead of the recipe's keys
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # what from_pretrained loads of a folder
SAMPLES, SAMPLE = 64, 2**18  # pieces of each file of weights, and bytes of a piece: 16 MiB are read


def recipe_facts(settings: Settings, strategy: Strategy) -> dict[str, Any]:
    """The part of a manifest that another run is compared with, as JSON."""
    values = settings.as_dict()
    facts = {key: values[key] for key in (*DECIDES, *LENGTH, *ROUNDING) if key in values}
    raw = strategy.ds_config.raw if strategy.ds_config is not None else {}
    facts |= {f"the ds_config's {block}": raw.get(block) for block in BLOCKS}
    facts["accelerator_config"] = _accelerator_config(settings.accelerator_config)
    facts["base_weights"] = base_weights(settings) if settings.use_peft and not settings.random_weights else None
    return json.loads(json.dumps(facts, default=lambda value: getattr(value, "value", str(value))))


def fit_findings(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What of a run does not fit the checkpoint; with a command where one helps.

    A checkpoint without a manifest cannot be compared; whoever names it by its path vouches for it.
    """
    if "nvme" in (strategy.offload_optimizer, strategy.offload_param):
        yield finding("ZR719", name=strategy.name, checkpoint=checkpoint)
    dispatches = _accelerator_config(settings.accelerator_config).get("dispatch_batches")
    if dispatches and strategy.world_size > 1 and not settings.dataset_streaming:  # TRL turns it off for a stream
        yield finding("ZR771", world_size=strategy.world_size, checkpoint=checkpoint)
    written = read_manifest(Path(checkpoint))
    if is_resharded(checkpoint):
        yield from _resharded(checkpoint, settings, strategy)
    if written is None:
        yield finding("ZR718", checkpoint=checkpoint)
        missing = _missing_states(Path(checkpoint), strategy)
        if missing:
            yield finding("ZR769", checkpoint=checkpoint, missing=", ".join(missing))
        return
    if not is_resharded(checkpoint):
        yield from _ranks(checkpoint, written, strategy)
    yield from _global_batch(checkpoint, written, settings, strategy)
    yield from _recipe(checkpoint, written, recipe_facts(settings, strategy))
    yield from _versions(checkpoint, written)


def refuse_other_data(checkpoint: str | None, data_sha256: str | None) -> None:
    """Refuse rows that are not those of the checkpoint. `data_sha256`: data.prepare.Prepared's; None for a stream."""
    written = read_manifest(Path(checkpoint)) if checkpoint else None
    then = data_sha256 if written is None else written.get("data_sha256", data_sha256)
    if then != data_sha256:
        old, new = ("none (streamed)" if digest is None else digest[:12] for digest in (then, data_sha256))
        raise refusal("ZR727", checkpoint=checkpoint, old=old, new=new)


def _missing_states(folder: Path, strategy: Strategy) -> list[str]:
    """Files that a resume would go on without: transformers and DeepSpeed begin with fresh states.

    transformers 5.23, trainer.py `_load_optimizer_and_scheduler` loads neither where one is missing; DeepSpeed 0.19.8,
    runtime/engine.py `load_checkpoint` keeps the fresh optimizer. Where DeepSpeed keeps the schedule, transformers
    writes no scheduler.pt.
    """
    own_schedule = strategy.ds_config is not None and strategy.ds_config.raw.get("scheduler") is not None
    missing = [] if own_schedule or (folder / "scheduler.pt").is_file() else ["scheduler.pt"]
    if is_resharded(folder):
        return missing
    if strategy.is_deepspeed:
        wanted, name = (strategy.world_size, "*_optim_states.pt") if strategy.zero_stage else (1, "*_model_states.pt")
        found = len(list(folder.glob(f"global_step*/{name}")))
        return missing + ([] if found >= wanted else [f"{wanted - found} of {wanted} files {name}"])
    there = any((folder / name).is_file() for name in ("optimizer.pt", "optimizer.bin"))
    return missing + ([] if there or any(path.is_dir() for path in folder.glob("optimizer_*")) else ["optimizer.pt"])


def _ranks(checkpoint: str, written: Mapping, strategy: Strategy) -> Iterator[Finding]:
    there = (written["zero_stage"], written["world_size"], written["strategy"] == "fsdp2")
    here = (strategy.zero_stage, strategy.world_size, strategy.is_fsdp)
    if there != here:
        command = f"zero-recipes reshard {checkpoint} --world_size {strategy.world_size} --stage {strategy.zero_stage}"
        yield finding(
            "ZR720",
            checkpoint=checkpoint,
            old=f"{written['strategy']} on {written['world_size']}",
            new=f"{strategy.name} on {strategy.world_size}",
            reshard="" if None in (there[0], here[0]) else f", or: {command}",
        )
    elif written["strategy"] != strategy.name:
        level = "error" if "_offload" in strategy.name else "warning"
        yield finding("ZR721", checkpoint=checkpoint, strategy=written["strategy"], name=strategy.name, level=level)


def _global_batch(checkpoint: str, written: Mapping, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    there = written["micro_batch_size"] * written["gradient_accumulation_steps"] * written["world_size"]
    micro = settings.per_device_train_batch_size
    here = micro * settings.gradient_accumulation_steps * strategy.world_size
    if there != here:
        per_pass = micro * strategy.world_size
        fitting = f"--per_device_train_batch_size {micro} --gradient_accumulation_steps {there // per_pass}"
        if there % per_pass:
            fitting = f"a per_device_train_batch_size that divides {there} / {strategy.world_size}"
        yield finding("ZR722", checkpoint=checkpoint, there=there, here=here, fitting=fitting)


def _recipe(checkpoint: str, written: Mapping, now: Mapping) -> Iterator[Finding]:
    then = written.get("recipe", {})
    changed = [key for key in then if then[key] != now.get(key)]
    other = [key for key in changed if key not in (*LENGTH, *ROUNDING, "base_weights")]
    if other:
        yield finding("ZR723", checkpoint=checkpoint, then=_listed(other, then), now=_listed(other, now))
    weights, weights_now = then.get("base_weights"), now["base_weights"]
    if None not in (weights, weights_now) and weights != weights_now:
        model = now["model_name_or_path"]
        yield finding("ZR768", checkpoint=checkpoint, model=model, then=weights, now=weights_now)
    rounding = [key for key in changed if key in ROUNDING]
    if now["lr_scheduler_type"] not in ("constant", "constant_with_warmup"):
        rounding += [key for key in changed if key in LENGTH]
    if rounding:
        yield finding("ZR724", checkpoint=checkpoint, then=_listed(rounding, then), now=_listed(rounding, now))
    if 0 < now["max_steps"] < written["step"]:
        yield finding("ZR725", checkpoint=checkpoint, step=written["step"], steps=now["max_steps"])


def _versions(checkpoint: str, written: Mapping) -> Iterator[Finding]:
    then, now = written.get("versions") or {}, library_versions()
    other = [name for name in then if then[name] != now.get(name)]
    if other:
        yield finding("ZR726", checkpoint=checkpoint, then=_listed(other, then), now=_listed(other, now))


def _listed(keys: list[str], values: Mapping) -> str:
    values = {key: values.get(key) for key in keys}
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _resharded(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What would make a run from a resharded checkpoint another one than that which was saved."""
    if strategy.zero_stage not in (1, 2, 3):
        yield finding("ZR712", name=strategy.name, checkpoint=checkpoint)
        return
    index, config = read_states_index(checkpoint), strategy.ds_config
    old_world, order = index["source"]["world_size"], str(settings.train_sampling_strategy)
    if order in ("group_by_length", "batch_rebalance") and strategy.world_size != old_world:
        yield finding("ZR714", order=order, world_size=strategy.world_size, checkpoint=checkpoint, old_world=old_world)
    round_robin = strategy.zero_stage != 3 and config.zero.get("round_robin_gradients")
    if round_robin or (strategy.zero_stage == 1 and config.grad_accum_dtype is not None):
        key = "round_robin_gradients" if round_robin else "data_types.grad_accum_dtype at stage 1"
        yield finding("ZR715", key=key, checkpoint=checkpoint)
    if index["states"] == "fp32" and config.bf16_masters:
        yield finding("ZR289", checkpoint=checkpoint, zero_stage=strategy.zero_stage)
    best = json.loads((Path(checkpoint) / STATE).read_text()).get("best_model_checkpoint")
    if settings.load_best_model_at_end and best is not None:
        yield finding("ZR717", best=best)


def base_weights(settings: Settings) -> str | None:
    """What identifies the weights of a model: of one of the hub its commit, of a folder a hash over its files.

    Of each file its name, size, and bytes spread evenly over it, the first and last ones among them: whoever trains or
    converts a model changes all of it. None where there are no weights.
    """
    name = settings.model_name_or_path
    if name is None:
        return None
    if not Path(name).is_dir():
        config = try_to_load_from_cache(name, "config.json", revision=settings.model_revision)
        return f"commit {Path(config).parent.name}" if isinstance(config, str) else None
    files = sorted(path for pattern in WEIGHTS for path in Path(name).glob(pattern))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return f"sha256 {digest.hexdigest()[:16]}" if files else None


def _accelerator_config(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """All its values, defaults included, but `non_blocking`, which is speed."""
    if isinstance(value, str):  # as the command line gives it, or a file
        try:
            value = json.loads(value if value.lstrip().startswith("{") else Path(value).read_text())
        except (OSError, ValueError):  # refused where it is used
            return {"file": value}
    values = AcceleratorConfig().to_dict() | (value if isinstance(value, dict) else {})
    return {key: each for key, each in values.items() if key != "non_blocking"}
