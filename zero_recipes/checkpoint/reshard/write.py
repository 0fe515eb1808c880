"""Write a checkpoint from which another ZeRO stage and world size goes on: zero-recipes reshard.

Weights and Adam's states are kept parameter by parameter (../resharded.py), so that any stage and world can take them.
DeepSpeed's universal checkpoint refuses 3 to 2 and 2 to 3 (runtime/state_dict_factory.py asserts on the other stage's
file names) and, at stage 3, gives one step counter to all groups (runtime/zero/stage3.py,
`load_hp_checkpoint_state_from_checkpoint_dir_stage3`: `state_step`); it is not used.

Memory: the states of one parameter at a time, mapped and copied, 24 bytes for each element of the largest one, and
some 30 MB. Measured growth of the peak: 34 MB for 302 MB of states in parameters of 1 MiB, 420 MB for 1.6 GB in
parameters of 64 MiB (fp32).

What cannot be the same: the random numbers of dropout, which are drawn by rank (old rank r hands its state to the new
ranks r, r + old world, ...); and, where the rows do not fill the last global batch of an epoch, that batch: with
another world, accelerate repeats other rows to even out the ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.reshard.read import Source, damaged, open_checkpoint, read_parameter
from zero_recipes.checkpoint.resharded import FOLDER, INDEX
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core import units
from zero_recipes.core.findings import refusal
from zero_recipes.core.host_limits import Host

_LEFT_BEHIND = ("global_step*", "latest", "zero_to_fp32.py", "zero_to_torch.py", "rng_state*.pth", manifest.MANIFEST)


class Batch(NamedTuple):
    """How the sequences of one optimizer step are spread."""

    micro: int
    accumulation: int
    world_size: int

    @property
    def total(self) -> int:
        return self.micro * self.accumulation * self.world_size

    def __str__(self) -> str:
        return f"{self.micro} per device x {self.accumulation} accumulation x {self.world_size} processes"


def reshard(
    checkpoint: Path, world_size: int, stage: int, skip_checksums: bool = False, trusted: bool = False
) -> tuple[Path, Batch]:
    """Write CHECKPOINT-zero<stage>-world<world_size> beside the checkpoint, which is not touched.

    Returns the new folder and its batch; the global batch is the old one's. It is written under a hidden name and
    renamed when it is whole. `skip_checksums`: neither compare nor write them; `trusted`: pickles may run code. Raises
    Refusal.
    """
    checkpoint = Path(os.path.normpath(checkpoint))
    target = checkpoint.with_name(f"{checkpoint.name}-zero{stage}-world{world_size}")
    _refuse_early(checkpoint, target, skip_checksums)
    source = open_checkpoint(checkpoint, trusted)
    batch = _batch(source, world_size)
    copied = _copied(checkpoint)
    _refuse_full_disk(target, source.state_bytes + sum(size for _, size in copied))

    unfinished = target.with_name(f".{target.name}.part")
    if unfinished.exists():  # a killed reshard left it
        shutil.rmtree(unfinished)
    (unfinished / FOLDER).mkdir(parents=True)
    _write_states(source, unfinished / FOLDER)
    for path, _ in copied:
        copy = unfinished / path.relative_to(checkpoint)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    _copy_random_states(source, world_size, unfinished)
    manifest.write(unfinished, _facts(source, batch, stage), not skip_checksums)
    os.sync()  # the new name must not reach the disk before the files
    unfinished.rename(target)
    return target, batch


def resume_command(target: Path, batch: Batch, strategy: str) -> str:
    """What a user types to go on."""
    return (
        f"accelerate launch --config_file accelerate_configs/{strategy}.yaml --num_processes {batch.world_size} "
        f"run_sft.py RECIPE.yaml --output_dir {target.parent} --per_device_train_batch_size {batch.micro} "
        f"--gradient_accumulation_steps {batch.accumulation} --resume_from_checkpoint {target}"
    )


def strategy_of(source_config: dict[str, Any], stage: int) -> str:
    """The accelerate file's name; an optimizer that was offloaded stays so, and states in bf16 do (neither has a file
    for stage 1, nor both together: fp32 takes bf16 states exactly)."""
    zero = source_config.get("zero_optimization", {})
    offloads = any((zero.get(key) or {}).get("device") == "cpu" for key in ("offload_optimizer", "offload_param"))
    kept = "_offload" if offloads else "_bf16_states" if DsConfig(source_config).bf16_states else ""
    return f"zero{stage}" + (kept if stage > 1 else "")


def _refuse_early(checkpoint: Path, target: Path, skip_checksums: bool) -> None:
    if target.exists():
        raise refusal("ZR741", target=target)
    damage = None if manifest.is_foreign(checkpoint) else manifest.damage(checkpoint)
    if damage is None and not skip_checksums:
        damage = manifest.content_fault(checkpoint)
    if damage is not None:
        raise damaged(checkpoint, damage)


def _batch(source: Source, world_size: int) -> Batch:
    """The same global batch over another world: the old micro batch if it fits, else the largest smaller one."""
    config = source.ds_config
    old = Batch(config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"], int(source.world_size))
    if old.total % world_size:
        raise refusal("ZR743", total=old.total, world_size=world_size, old=old)
    each = old.total // world_size
    micro = max(size for size in range(1, old.micro + 1) if each % size == 0)
    return Batch(micro, each // micro, world_size)


def _copied(checkpoint: Path) -> list[tuple[Path, int]]:
    """[(file, bytes)] that the new checkpoint takes as they are: weights, tokenizer, trainer and scheduler state."""
    found = []
    for top in sorted(checkpoint.iterdir()):
        if not any(top.match(pattern) for pattern in _LEFT_BEHIND):
            found += [path for path in ([top] if top.is_file() else sorted(top.rglob("*"))) if path.is_file()]
    return [(path, path.stat().st_size) for path in found]


def _refuse_full_disk(target: Path, needed: int) -> None:
    free = Host().free_disk(target.parent)
    if needed > free:
        raise refusal("ZR744", target=target, size=units.size(needed), size_2=units.size(free))


def _write_states(source: Source, folder: Path) -> None:
    from rich.progress import track
    from safetensors.torch import save_file

    for name in track(source.places, description="parameters"):
        save_file(read_parameter(source, name), folder / f"{name}.safetensors")
    index = {
        "source": {"checkpoint": source.checkpoint.name, "stage": source.stage, "world_size": source.world_size},
        "adam_step": source.adam_step,
        "states": "bf16" if DsConfig(source.ds_config).bf16_states else "fp32",
        "engine": source.engine,
        "groups": source.groups,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_random_states(source: Source, world_size: int, folder: Path) -> None:
    """rng_state_<rank>.pth, or rng_state.pth for one process (transformers 5.23, trainer.py `_load_rng_state`)."""
    for rank in range(world_size):
        old = source.checkpoint / _random_state(rank % source.world_size, source.world_size)
        if old.is_file():
            shutil.copy2(old, folder / _random_state(rank, world_size))


def _random_state(rank: int, world_size: int) -> str:
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def _facts(source: Source, batch: Batch, stage: int) -> dict[str, Any]:
    """For the manifest: what the old one says, with the new stage, world and batch."""
    config = source.ds_config
    known = {
        "step": json.loads((source.checkpoint / manifest.STATE).read_text())["global_step"],
        "precision": "bf16" if config.get("bf16", {}).get("enabled") else "fp32",
    }
    return (
        known
        | manifest.facts(source.checkpoint)
        | {
            "strategy": strategy_of(config, stage),
            "zero_stage": stage,
            "world_size": batch.world_size,
            "micro_batch_size": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
    )
