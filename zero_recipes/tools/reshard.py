"""`zero-recipes reshard`: convert a checkpoint to another ZeRO stage and world size.

Each parameter's master and moments are read without a launch and written by name.
checkpoint/resharded.py loads them at any stage and world size.
DeepSpeed's universal checkpoint refuses 3 to 2 and 2 to 3 (runtime/state_dict_factory.py).
At stage 3 it gives all groups one step counter:
runtime/zero/stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`.

Layouts are DeepSpeed 0.19.8's, paths relative to deepspeed/runtime.
Each rank's file holds its partition of each flat group's fp32 master and moments.

- Stages 1 and 2 (zero/stage_1_and_2.py, `state_dict`) join a group's parameters and cut them into equal partitions.
  `param_alignment_paddings` says where padding is.
  The order is that of `param_shapes` (engine.py `_get_zero_param_shapes`).
  `param_slice_mappings` is wrong with round_robin_gradients.
- Stage 3 (zero/stage3.py, `_rigid_state_dict`) cuts each parameter into partitions of ceil(elements / world).
  A rank's group joins its partitions.
"""

import json
import os
import pickle
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.pickles import code_in, code_refusal
from zero_recipes.checkpoint.resharded import ADAM_STATES, HYPERPARAMETERS
from zero_recipes.checkpoint.resume import Batch
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.files import NOT_RESHARDED, PART
from zero_recipes.core.findings import Refusal, finding, first_line, refusal
from zero_recipes.core.folder_lock import held
from zero_recipes.engine.faults.pickled_code import load_without_code

Shapes = dict[str, tuple[int, ...]]  # of a group's parameters, by name

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class Place(NamedTuple):
    """A parameter: the flat group that holds it, its shape, and its pieces in order."""

    group: int
    shape: tuple[int, ...]
    pieces: list[tuple[int, int, int]]  # (rank, start, count): elements of that rank's flat group


@dataclass(frozen=True)
class Source:
    """An open DeepSpeed checkpoint. No state has been read."""

    checkpoint: Path
    stage: int
    files: list[Path]  # optimizer states, by rank
    places: dict[str, Place]  # by parameter name
    groups: list[dict[str, Any]]  # the optimizer's groups: hyperparameters and the names of their parameters
    adam_step: int
    engine: dict[str, Any]  # global_steps, global_samples, skipped_steps, lr_scheduler
    ds_config: dict[str, Any]  # as the engine had it, no "auto"

    @property
    def world_size(self) -> int:
        """The number of processes that wrote the checkpoint."""
        return len(self.files)


def reshard(checkpoint: Path, world_size: int, stage: int, skip_checksums: bool = False) -> tuple[Path, Batch]:
    """Write CHECKPOINT-zero<stage>-world<world_size> beside the checkpoint.

    Returns the new folder and its batch, globally as large as before.
    Waits for another reshard beside the checkpoint, which may make the same.
    Raises Refusal.
    """
    checkpoint = Path(os.path.normpath(checkpoint))
    target = checkpoint.with_name(f"{checkpoint.name}-zero{stage}-world{world_size}")
    if target.exists():
        raise refusal("ZR741", target=target)
    if not checkpoint.is_dir():
        raise _without_deepspeed(checkpoint)
    with held(checkpoint.parent, "reshard", waits_for="reshard"):
        if target.exists():
            return target, _batch_of(target)
        unfinished = target.with_name(f".{target.name}{PART}")
        shutil.rmtree(unfinished, ignore_errors=True)  # a killed reshard left it
        try:
            with _unchanged(checkpoint):
                batch = _write(checkpoint, unfinished, world_size, stage, skip_checksums)
        except Refusal:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        os.sync()  # the new name must not reach the disk before the files
        unfinished.rename(target)
    return target, batch


def _batch_of(target: Path) -> Batch:
    """Of one that another process has made."""
    facts = save.read_manifest(target)
    if facts is None:
        raise _damaged(target, "its manifest is missing or was changed")
    return Batch(facts["micro_batch_size"], facts["gradient_accumulation_steps"], facts["world_size"])


@contextmanager
def _unchanged(checkpoint: Path) -> Iterator[None]:
    """Raises Refusal if the checkpoint is changed inside, whatever a library makes of it.

    A run that rotates it away holds the folder. Another program, or a run elsewhere without locks, does not.
    """
    before = _listing(checkpoint)
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if _listing(checkpoint) != before:
        raise refusal("ZR850", checkpoint=checkpoint) from failure
    if failure is not None:
        raise failure


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """{file: its size and time of change}."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def _write(checkpoint: Path, unfinished: Path, world_size: int, stage: int, skip_checksums: bool) -> Batch:
    fault = None if save.is_foreign(checkpoint) else save.checkpoint_fault(checkpoint)
    if fault is None and not skip_checksums:
        fault = save.content_fault(checkpoint)
    if fault is not None:
        raise _damaged(checkpoint, fault)
    is_known = save.read_manifest(checkpoint) is not None
    if not is_known:
        print(finding("ZR772", checkpoint=checkpoint))
    source = open_checkpoint(checkpoint)
    micro = source.ds_config["train_micro_batch_size_per_gpu"]
    accumulation = source.ds_config["gradient_accumulation_steps"]
    batch = Batch(micro, accumulation, source.world_size).over(world_size)

    left_out = shutil.ignore_patterns(save.LATEST, save.MANIFEST, *NOT_RESHARDED)
    shutil.copytree(checkpoint, unfinished, ignore=left_out)
    _write_states(source, unfinished)
    _copy_random_states(source, world_size, unfinished)
    save.write_manifest(unfinished, _facts(source, batch, stage), is_known and not skip_checksums)
    return batch


def resume_command(target: Path, batch: Batch, strategy: str) -> str:
    """Write the command that goes on from the new checkpoint."""
    return (
        f"zero-recipes train RECIPE.yaml --config_file {strategy}.yaml --num_processes {batch.world_size} "
        f"--output_dir {target.parent} --per_device_train_batch_size {batch.micro} "
        f"--gradient_accumulation_steps {batch.accumulation} --resume_from_checkpoint {target}"
    )


def strategy_of(source_config: dict[str, Any], stage: int) -> str:
    """Name the accelerate file for the new checkpoint. Offload and bf16 states are kept.

    Stage 1 has no file for either, and no file has both: fp32 takes bf16 states exactly.
    """
    config = DsConfig(source_config)
    if stage > 1 and config.offloads:
        return f"zero{stage}_offload"
    if stage > 1 and config.bf16_states:
        return f"zero{stage}_bf16_states"
    return f"zero{stage}"


def open_checkpoint(checkpoint: Path) -> Source:
    """Open a checkpoint to be read by parameter. Raises Refusal for what cannot be."""
    if not (checkpoint / save.LATEST).is_file():
        raise _without_deepspeed(checkpoint)
    fault = save.document_fault(checkpoint)
    if fault is not None:
        raise _damaged(checkpoint, fault)
    folder = checkpoint / (checkpoint / save.LATEST).read_text().strip()
    model_files = sorted(folder.glob("*_model_states.pt"))
    if not model_files:
        raise _damaged(checkpoint, f"{folder.name} has no *_model_states.pt")
    model = _load(model_files[0])
    reason = _unreadable(folder, model)
    if reason is not None:
        raise _other(checkpoint, reason)
    files = _optimizer_files(folder)
    if len(files) != model["dp_world_size"]:
        how = f"{folder.name} has optimizer states of {len(files)} of {model['dp_world_size']} ranks"
        raise _damaged(checkpoint, how)

    steps = set()
    for file in reversed(files):  # rank 0 last: its partitions are never cut short
        states, flats, base = _states_of(file)
        if "zero_stage" not in states:  # stage 1 in bf16 with gradients accumulated in fp32
            raise _other(checkpoint, "by DeepSpeed's BF16_Optimizer")
        _refuse_unless_adam(checkpoint, base, len(flats))
        steps |= _step_counters(base)
    if len(steps) != 1:
        raise _damaged(checkpoint, f"Adam's step counters differ between groups or ranks: {sorted(steps)}")
    stage = int(states["zero_stage"])
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    return Source(
        checkpoint=checkpoint,
        stage=stage,
        files=files,
        places=_places(flats, states, stage, len(files), shapes),
        groups=[_described(group, shapes) for group in base["param_groups"]],
        adam_step=steps.pop(),
        engine={key: model[key] for key in ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")},
        ds_config=dict(model["ds_config"]),
    )


def _optimizer_files(folder: Path) -> list[Path]:
    """By rank."""
    by_rank = {}
    for path in folder.iterdir():
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match:
            by_rank[int(match[1])] = path
    return [by_rank[rank] for rank in sorted(by_rank)]


def _refuse_unless_adam(checkpoint: Path, base: Any, groups: int) -> None:
    """`base`: the inner optimizer's state_dict; a list of elastic_checkpoint."""
    kinds = {"those of elastic_checkpoint"}
    if isinstance(base, dict):
        kinds = {key for state in base["state"].values() for key in state} - {"step"}
    if kinds != set(ADAM_STATES) or len(base["state"]) != groups:
        raise _other(checkpoint, f"with optimizer states other than Adam's: {', '.join(sorted(map(str, kinds)))}")


def _step_counters(base: dict[str, Any]) -> set[int]:
    """torch and DeepSpeedCPUAdam count in each state, FusedAdam in its groups."""
    counted = [state["step"] for state in base["state"].values() if "step" in state]
    if not counted:
        counted = [group["step"] for group in base["param_groups"]]
    return {int(step) for step in counted}


def _described(group: dict[str, Any], shapes: list[Shapes]) -> dict[str, Any]:
    """An optimizer group's hyperparameters and parameter names."""
    names = []
    for flat in group["params"]:
        names += shapes[flat]
    return {key: group[key] for key in HYPERPARAMETERS if key in group} | {"names": names}


def read_parameter(source: Source, name: str) -> dict[str, torch.Tensor]:
    """Read one parameter, in its shape, bits and dtype: {"fp32", "exp_avg", "exp_avg_sq"}.

    "fp32", the master, is bf16 under bf16_master_weights_and_grads.
    Files are mapped anew for each parameter: pages that were read stay resident as long as their mapping.
    Raises RuntimeError if one is cut off.
    """
    place = source.places[name]
    parts = defaultdict(list)
    for rank, start, count in place.pieces:
        _, flats, base = _states_of(source.files[rank])
        tensors = base["state"][place.group] | {"fp32": flats[place.group]}
        for key in ("fp32", *ADAM_STATES):
            parts[key].append(tensors[key][start : start + count])
    return {key: torch.cat(pieces).view(place.shape) for key, pieces in parts.items()}


def _load(file: Path) -> dict[str, Any]:
    try:
        return load_without_code(file)
    except pickle.UnpicklingError:
        raise code_refusal(file.parents[1], code_in(file.parents[1])) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise _damaged(file.parents[1], f"{file.name} cannot be read: {first_line(error)}") from None


def _states_of(file: Path) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
    """(a rank's states, the flat groups of its masters, the inner optimizer's state_dict)."""
    states = _load(file)["optimizer_state_dict"]
    if "fp32_flat_groups" in states:  # stage 3
        return states, states["fp32_flat_groups"], states["optimizer_state_dict"]
    return states, states.get("single_partition_of_fp32_groups"), states.get("base_optimizer_state")


def _damaged(checkpoint: Path, how: str) -> Refusal:
    return refusal("ZR729", checkpoint=checkpoint, how=how)


def _other(checkpoint: Path, how: str) -> Refusal:
    """`how` it was written."""
    return refusal("ZR731", checkpoint=checkpoint, how=how)


def _without_deepspeed(checkpoint: Path) -> Refusal:
    return _other(checkpoint, "without DeepSpeed, with save_only_model or by a reshard: it has no file `latest`")


def _unreadable(folder: Path, model: dict[str, Any]) -> str | None:
    """Why states cannot be read by parameter. `model`: rank 0's *_model_states.pt.

    In DeepSpeed 0.19.8, runtime/:
    - Stage 0 numbers its states (engine.py `_common_checkpoint_state`).
    - NVMe offload leaves them on the disk (engine.py `load_checkpoint`).
    - MiCS repeats its parts in groups of ranks.
    - At stage 3, masters alone in bf16 are gathered in bf16 (zero/stage3.py `_fp32_state_allgather`).
    """
    config = DsConfig(model["ds_config"])
    reasons = {
        "at ZeRO stage 0": config.stage == 0,
        "by a model-parallel run": model["mp_world_size"] != 1 or any(folder.glob("*mp_rank_01*")),
        "by a mixture-of-experts run": "num_experts" in model,
        "in fp16": config.raw.get("fp16", {}).get("enabled"),
        "with bf16 master weights and fp32 states": config.bf16_masters and not config.bf16_states,
        "with mics_shard_size": config.zero.get("mics_shard_size", -1) > 0,
        "with states on NVMe": config.on_nvme,
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    return None


def _places(
    flats: list[torch.Tensor], states: dict[str, Any], stage: int, world_size: int, shapes: list[Shapes]
) -> dict[str, Place]:
    """By parameter name. `states` and `flats` are rank 0's, whose partitions are never cut short."""
    places = {}
    aligned = states.get("param_alignment_paddings")  # not at stage 3, nor before DeepSpeed 0.19
    for group, (flat, named) in enumerate(zip(flats, shapes, strict=True)):
        paddings = aligned[group] if aligned else [0] * len(named)
        start = 0
        for (name, shape), padding in zip(named.items(), paddings, strict=True):
            count = torch.Size(shape).numel()
            if stage == 3:
                part = -(-count // world_size)
                pieces = _shares(start, count, part)
                start += part
            else:
                pieces = _cut(start, count, flat.numel())
                start += count + padding
            places[name] = Place(group, shape, pieces)
    return places


def _shares(start: int, count: int, part: int) -> list[tuple[int, int, int]]:
    """`count` elements in parts of `part`, one a rank, each at `start` of its flat group."""
    pieces = []
    for rank, first in enumerate(range(0, count, part)):
        pieces.append((rank, start, min(part, count - first)))
    return pieces


def _cut(start: int, count: int, partition: int) -> list[tuple[int, int, int]]:
    """`start` counts from the whole group, of which each rank has one `partition`."""
    pieces = []
    while count:
        rank, inside = divmod(start, partition)
        size = min(count, partition - inside)
        pieces.append((rank, inside, size))
        start += size
        count -= size
    return pieces


def _write_states(source: Source, folder: Path) -> None:
    from rich.progress import track
    from safetensors.torch import save_file

    (folder / save.STATES).mkdir()
    for name in track(source.places, description="parameters"):
        save_file(read_parameter(source, name), folder / save.STATES / f"{name}.safetensors")
    index = {
        "source": {"checkpoint": source.checkpoint.name, "stage": source.stage, "world_size": source.world_size},
        "adam_step": source.adam_step,
        "states": "bf16" if DsConfig(source.ds_config).bf16_states else "fp32",
        "engine": source.engine,
        "groups": source.groups,
    }
    (folder / save.INDEX_OF_STATES).write_text(json.dumps(index, indent=2) + "\n")


def _copy_random_states(source: Source, world_size: int, folder: Path) -> None:
    """rng_state_<rank>.pth, or rng_state.pth for one process (transformers 5.23, trainer.py `_load_rng_state`)."""

    def name(rank: int, world: int) -> str:
        return "rng_state.pth" if world == 1 else f"rng_state_{rank}.pth"

    for rank in range(world_size):
        old = source.checkpoint / name(rank % source.world_size, source.world_size)
        if old.is_file():
            shutil.copy2(old, folder / name(rank, world_size))


def _facts(source: Source, batch: Batch, stage: int) -> dict[str, Any]:
    """The old manifest with the new stage, world and batch."""
    step = json.loads((source.checkpoint / save.STATE).read_text())["global_step"]
    return {"step": step, **(save.read_manifest(source.checkpoint) or {})} | {
        "strategy": strategy_of(source.ds_config, stage),
        "zero_stage": stage,
        "world_size": batch.world_size,
        "micro_batch_size": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
