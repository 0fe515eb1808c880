"""What a run takes from files beside its recipe, and what a checkpoint must hold: both are compared before a resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.trainer_pt_utils import AcceleratorConfig

from zero_recipes.checkpoint.reshard.load import is_resharded
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # what from_pretrained loads of a folder
SAMPLES, SAMPLE = 64, 2**18  # of each file, and bytes: some 16 MiB are read, of a smaller file all
BLOCKS = ("optimizer", "scheduler", "gradient_clipping")  # of a ds_config: they count instead of the recipe's keys
SPEED = ("non_blocking",)  # of accelerator_config: not what is trained


def input_facts(settings: Settings, strategy: Strategy) -> dict[str, Any]:
    """The part of a manifest that says what a run took from other files than its recipe, as JSON."""
    raw = strategy.ds_config.raw if strategy.ds_config is not None else {}
    facts: dict[str, Any] = {f"the ds_config's {block}": raw.get(block) for block in BLOCKS}
    facts["accelerator_config"] = _accelerator_config(settings.accelerator_config)
    facts["base_weights"] = base_weights(settings) if settings.use_peft and not settings.random_weights else None
    return json.loads(json.dumps(facts, default=str))


def input_findings(checkpoint: str, written: Mapping, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """What differs from the run that wrote the manifest; nothing of what an older version did not note."""
    then, now = written.get("inputs", {}), input_facts(settings, strategy)
    other = [key for key in now if key in then and key != "base_weights" and then[key] != now[key]]
    if other:
        yield finding("ZR767", checkpoint=checkpoint, other=_listed(other, then), other_2=_listed(other, now))
    weights = then.get("base_weights")
    if None not in (weights, now["base_weights"]) and weights != now["base_weights"]:
        yield finding(
            "ZR768",
            checkpoint=checkpoint,
            model_name_or_path=settings.model_name_or_path,
            weights=weights,
            base_weights=now["base_weights"],
        )


def dispatch_findings(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """Rows that rank 0 hands out cannot be skipped as they were taken. TRL turns it off for a stream."""
    loading = _accelerator_config(settings.accelerator_config)
    if strategy.world_size > 1 and loading.get("dispatch_batches") and not settings.dataset_streaming:
        yield finding("ZR771", world_size=strategy.world_size, checkpoint=checkpoint)


def missing_state_findings(checkpoint: str, settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """Files that a resume without a manifest would go on without: transformers and DeepSpeed begin with fresh states.

    transformers 5.23, trainer.py `_load_optimizer_and_scheduler` loads neither where one is missing, `_load_rng_state`
    and `_load_scaler` nothing; DeepSpeed 0.19.8, runtime/engine.py `load_checkpoint` keeps the fresh optimizer.
    """
    folder = Path(checkpoint)
    missing = [] if _own_scheduler(strategy) or (folder / "scheduler.pt").is_file() else ["scheduler.pt"]
    missing += _missing_optimizer(folder, strategy)
    if missing:
        yield finding("ZR769", checkpoint=checkpoint, missing=", ".join(missing))
    ranks = range(strategy.world_size)
    random = ["rng_state.pth"] if strategy.world_size == 1 else [f"rng_state_{rank}.pth" for rank in ranks]
    lost = [name for name in random if not (folder / name).is_file()]
    if lost:
        yield finding("ZR770", checkpoint=checkpoint, lost=", ".join(lost))


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
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for part in _spread(path):
            digest.update(part)
    return f"sha256 {digest.hexdigest()[:16]}" if files else None


def _spread(path: Path) -> Iterator[bytes]:
    """The whole of a small file, SAMPLES pieces of a large one."""
    last = path.stat().st_size - SAMPLE
    with open(path, "rb") as file:
        if last <= SAMPLES * SAMPLE:
            yield from iter(lambda: file.read(SAMPLE), b"")
            return
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            yield file.read(SAMPLE)


def _accelerator_config(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """All its values, defaults included, but those of speed."""
    if isinstance(given, str):  # as the command line gives it, or a file
        try:
            given = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
        except (OSError, ValueError):  # refused where it is used
            return {"file": given}
    values = AcceleratorConfig().to_dict() | (given if isinstance(given, dict) else {})
    return {key: value for key, value in values.items() if key not in SPEED}


def _own_scheduler(strategy: Strategy) -> bool:
    """Whether DeepSpeed keeps the schedule: transformers writes no scheduler.pt then."""
    return strategy.ds_config is not None and strategy.ds_config.raw.get("scheduler") is not None


def _missing_optimizer(folder: Path, strategy: Strategy) -> list[str]:
    if is_resharded(folder):
        return []
    if strategy.is_deepspeed:
        wanted = strategy.world_size if strategy.zero_stage else 0
        found = len(list(folder.glob("global_step*/*_optim_states.pt")))
        return [] if found >= wanted else [f"{wanted - found} of {wanted} files *_optim_states.pt"]
    there = any((folder / name).is_file() for name in ("optimizer.pt", "optimizer.bin"))
    return [] if there or any(path.is_dir() for path in folder.glob("optimizer_*")) else ["optimizer.pt"]


def _listed(keys: list[str], values: Mapping) -> str:
    return ", ".join(f"{key} {json.dumps(values[key])}" for key in keys)
