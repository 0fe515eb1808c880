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

Read a DeepSpeed checkpoint of stage 1, 2 or 3, of any world size, one parameter at a time and without a launch.

Each rank's file holds, for each flat group, its partition of the fp32 master and of Adam's moments.
Layouts as DeepSpeed 0.19.8 writes them; paths below are relative to deepspeed/runtime.

- Stages 1 and 2 (zero/stage_1_and_2.py, `state_dict`): the parameters of a group lie one after another, padded where
  `param_alignment_paddings` says, and are cut into equal partitions. The order is that of `param_shapes`
  (engine.py `_get_zero_param_shapes`), which is right with round_robin_gradients too; `param_slice_mappings` is not.
- Stage 3 (zero/stage3.py, `_rigid_state_dict`): each parameter is cut into equal partitions, ceil(elements / world)
  each, and every rank's group holds its partitions of the group's parameters one after another.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_recipes.checkpoint.resume import ADAM_STATES, HYPERPARAMETERS, code_in, refuse_code
from zero_recipes.checkpoint.save import (
    LATEST,
    MANIFEST,
    STATE,
    STATES,
    checkpoint_fault,
    content_fault,
    document_fault,
    is_foreign,
    is_resharded,
    manifest_facts,
    write_manifest,
)
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core import units
from zero_recipes.core.findings import Refusal, first_line, refusal
from zero_recipes.core.host import Host
from zero_recipes.libs.huggingface import load_without_code

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class Piece(NamedTuple):
    """Where a part of a parameter lies: elements start to start + count of a rank's flat group."""

    rank: int
    start: int
    count: int


class Place(NamedTuple):
    """A parameter: the flat group that holds it, its shape, and its pieces in order."""

    group: int
    shape: tuple[int, ...]
    pieces: list[Piece]


@dataclass(frozen=True)
class Source:
    """A DeepSpeed checkpoint, opened: what it holds is known, no state has been read."""

    checkpoint: Path
    stage: int
    world_size: int
    files: list[Path]  # optimizer states, by rank
    places: dict[str, Place]  # by parameter name
    groups: list[dict[str, Any]]  # the optimizer's groups: hyperparameters and the names of their parameters
    adam_step: int
    engine: dict[str, Any]  # global_steps, global_samples, skipped_steps, lr_scheduler
    ds_config: dict[str, Any]  # as the engine had it, no "auto"
    trusted: bool = False  # its pickles may run code

    @property
    def state_bytes(self) -> int:
        """Of masters and Adam's moments, padding left out."""
        elements = sum(torch.Size(place.shape).numel() for place in self.places.values())
        return elements * DsConfig(self.ds_config).adam_bytes


def open_checkpoint(checkpoint: Path, trusted: bool = False) -> Source:
    """Find the files, read their small parts and refuse what cannot be read by parameter. Raises Refusal.

    `trusted`: pickles of the checkpoint may run code, as DeepSpeed's own load lets them.
    """
    try:
        return _opened(checkpoint, trusted)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        how = f"its files do not hold what DeepSpeed writes ({type(error).__name__}: {error})"
        raise damaged(checkpoint, how) from error


def _opened(checkpoint: Path, trusted: bool) -> Source:
    folder = _states_folder(checkpoint)
    files = _optimizer_files(folder)
    model_file = next(iter(sorted(folder.glob("*_model_states.pt"))), None)
    if model_file is None:
        raise damaged(checkpoint, f"{folder.name} has no *_model_states.pt")
    model = _load(model_file, trusted)
    _refuse(checkpoint, _unreadable(folder, model))
    world_size = model["dp_world_size"]
    if len(files) != world_size:
        raise damaged(checkpoint, f"{folder.name} has optimizer states of {len(files)} of {world_size} ranks")

    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    stage, steps, groups = 0, set(), []
    for file in files:
        states = _load(file, trusted)["optimizer_state_dict"]
        if "zero_stage" not in states:  # stage 1 in bf16 with gradients accumulated in fp32
            _refuse(checkpoint, "by DeepSpeed's BF16_Optimizer")
        stage = int(states["zero_stage"])
        base = _base_states(states)
        _refuse_other_optimizers(checkpoint, base, _flat_groups(states))
        steps |= _steps(base)
        if not groups:
            groups = _hyperparameters(base, shapes)
            places = places_of(_flat_groups(states), states, stage, len(files), shapes)
    if len(steps) != 1:
        raise damaged(checkpoint, f"Adam's step counters differ between groups or ranks: {sorted(steps)}")
    engine = {key: model[key] for key in ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")}
    ds_config = dict(model["ds_config"])
    return Source(checkpoint, stage, len(files), files, places, groups, steps.pop(), engine, ds_config, trusted)


def read_parameter(source: Source, name: str) -> dict[str, torch.Tensor]:
    """{"fp32", "exp_avg", "exp_avg_sq"} of one parameter, in its shape: the master's and moments' own bits and dtype
    ("fp32", the master, is bf16 under bf16_master_weights_and_grads).

    The files are mapped into memory, and anew for each parameter: pages that were read count as resident until the
    mapping goes, so that no more than one parameter is in memory at a time. Raises Refusal where a piece is missing.
    """
    place = source.places[name]
    parts: dict[str, list[torch.Tensor]] = {key: [] for key in ("fp32", *ADAM_STATES)}
    for rank, start, count in place.pieces:
        states = _load(source.files[rank], source.trusted)["optimizer_state_dict"]
        adam = _base_states(states)["state"][place.group]
        flat = {"fp32": _flat_groups(states)[place.group]} | {key: adam[key] for key in ADAM_STATES}
        for key, tensor in flat.items():
            if start + count > tensor.numel():
                raise damaged(source.checkpoint, f"{source.files[rank].name} is too short for {name}")
            parts[key].append(tensor[start : start + count])
    return {key: torch.cat(pieces).view(place.shape) for key, pieces in parts.items()}


def _load(file: Path, trusted: bool) -> dict[str, Any]:
    try:
        if trusted:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        return load_without_code(file)
    except pickle.UnpicklingError:
        refuse_code(file.parents[1], code_in(file.parents[1]))
        raise damaged(file.parents[1], f"{file.name} cannot be read") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise damaged(file.parents[1], f"{file.name} cannot be read: {first_line(error)}") from None


def damaged(checkpoint: Path, how: str) -> Refusal:
    return refusal("ZR729", checkpoint=checkpoint, how=how)


def _states_folder(checkpoint: Path) -> Path:
    if is_resharded(checkpoint):
        _refuse(checkpoint, "by zero-recipes reshard; take the checkpoint that it was made from")
    if not (checkpoint / LATEST).is_file():
        _refuse(checkpoint, "without DeepSpeed or with save_only_model: it has no file `latest`")
    fault = document_fault(checkpoint)
    if fault is not None:
        raise damaged(checkpoint, fault)
    return checkpoint / (checkpoint / LATEST).read_text().strip()


def _unreadable(folder: Path, model: dict[str, Any]) -> str | None:
    """Why states cannot be read by parameter. `folder`: of each rank's states; `model`: rank 0's *_model_states.pt.

    Of DeepSpeed 0.19.8, runtime/: stage 0 numbers its states (engine.py `_common_checkpoint_state`), NVMe offload
    leaves them on the disk (engine.py `load_checkpoint`), MiCS repeats its parts in groups of ranks, and the masters
    alone in bf16 are gathered in bf16 at stage 3 (zero/stage3.py `_fp32_state_allgather`).
    """
    config = model["ds_config"]
    zero = config.get("zero_optimization", {})
    reasons = {
        "at ZeRO stage 0": zero.get("stage", 0) == 0,
        "by a model-parallel run": model["mp_world_size"] != 1 or any(folder.glob("*mp_rank_01*")),
        "by a mixture-of-experts run": "num_experts" in model,
        "in fp16": config.get("fp16", {}).get("enabled"),
        "with masters in bf16 and states in fp32": DsConfig(config).bf16_masters and not DsConfig(config).bf16_states,
        "with mics_shard_size": zero.get("mics_shard_size", -1) > 0,
        "with states on NVMe": any(
            (zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param")
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _refuse(checkpoint: Path, how: str | None) -> None:
    """Refuse a checkpoint that was written in such a way."""
    if how is not None:
        raise refusal("ZR731", checkpoint=checkpoint, how=how)


def _optimizer_files(folder: Path) -> list[Path]:
    """By rank."""
    named = {path: _OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir()}
    return sorted((path for path, match in named.items() if match), key=lambda path: int(named[path][1]))


def _flat_groups(states: dict[str, Any]) -> list[torch.Tensor]:
    return states["fp32_flat_groups" if "fp32_flat_groups" in states else "single_partition_of_fp32_groups"]


def _base_states(states: dict[str, Any]) -> dict[str, Any]:
    """The inner optimizer's state_dict: {"state": {flat group: states}, "param_groups": [...]}."""
    return states["optimizer_state_dict" if "fp32_flat_groups" in states else "base_optimizer_state"]


def _refuse_other_optimizers(checkpoint: Path, base: Any, flats: list[torch.Tensor]) -> None:
    found = {"those of elastic_checkpoint"}
    if isinstance(base, dict):
        found = {key for state in base["state"].values() for key in state} - {"step"}
    if found != set(ADAM_STATES) or len(base["state"]) != len(flats):
        held = ", ".join(sorted(map(str, found))) or "none"
        _refuse(checkpoint, f"with other optimizer states than Adam's: {held}")


def _steps(base: dict[str, Any]) -> set[int]:
    """torch and DeepSpeedCPUAdam count in each state, FusedAdam in its groups."""
    counted = [state["step"] for state in base["state"].values() if "step" in state]
    return {int(step) for step in counted or [group["step"] for group in base["param_groups"]]}


def _hyperparameters(base: dict[str, Any], shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups with their parameters' names; `params` are the numbers of the flat groups."""
    return [
        {key: group[key] for key in HYPERPARAMETERS if key in group}
        | {"names": [name for flat in group["params"] for name in shapes[flat]]}
        for group in base["param_groups"]
    ]


def places_of(
    flats: list[torch.Tensor],
    states: dict[str, Any],
    stage: int,
    world_size: int,
    shapes: list[dict[str, tuple[int, ...]]],
) -> dict[str, Place]:
    """Where every parameter lies, by name. `states`: the optimizer's of rank 0, whose partitions are never cut short;
    `flats`: their flat groups; `shapes`: of the parameters of each group, in the order of `param_shapes`."""
    places = {}
    for group, (flat, named) in enumerate(zip(flats, shapes, strict=True)):
        start = 0
        aligned = states.get("param_alignment_paddings")  # not at stage 3, nor before DeepSpeed 0.19
        paddings = aligned[group] if aligned else [0] * len(named)
        for (name, shape), padding in zip(named.items(), paddings, strict=True):
            count = torch.Size(shape).numel()
            if stage == 3:
                part = -(-count // world_size)
                left = [max(0, min(part, count - rank * part)) for rank in range(world_size)]
                pieces = [Piece(rank, start, size) for rank, size in enumerate(left) if size]
                start += part
            else:
                pieces = _cut(start, count, flat.numel())
                start += count + padding
            places[name] = Place(group, shape, pieces)
    return places


def _cut(start: int, count: int, partition: int) -> list[Piece]:
    """Elements start to start + count of the whole group, cut at the borders of the ranks' partitions."""
    pieces = []
    while count:
        rank, inside = divmod(start, partition)
        size = min(count, partition - inside)
        pieces.append(Piece(rank, inside, size))
        start, count = start + size, count - size
    return pieces


_LEFT_BEHIND = ("global_step*", "latest", "zero_to_fp32.py", "zero_to_torch.py", "rng_state*.pth", MANIFEST)


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
    (unfinished / STATES).mkdir(parents=True)
    _write_states(source, unfinished / STATES)
    for path, _ in copied:
        copy = unfinished / path.relative_to(checkpoint)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    _copy_random_states(source, world_size, unfinished)
    write_manifest(unfinished, _facts(source, batch, stage), not skip_checksums)
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
    damage = None if is_foreign(checkpoint) else checkpoint_fault(checkpoint)
    if damage is None and not skip_checksums:
        damage = content_fault(checkpoint)
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
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n")


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
        "step": json.loads((source.checkpoint / STATE).read_text())["global_step"],
        "precision": "bf16" if config.get("bf16", {}).get("enabled") else "fp32",
    }
    return (
        known
        | manifest_facts(source.checkpoint)
        | {
            "strategy": strategy_of(config, stage),
            "zero_stage": stage,
            "world_size": batch.world_size,
            "micro_batch_size": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
    )
