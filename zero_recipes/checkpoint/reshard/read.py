"""Read a DeepSpeed checkpoint of stage 1, 2 or 3, of any world size, one parameter at a time and without a launch.

Each rank's file holds, for each flat group, its partition of the fp32 master and of Adam's moments: places.py.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_recipes.checkpoint.documents import LATEST, document_fault
from zero_recipes.checkpoint.reshard.places import Place, places_of
from zero_recipes.checkpoint.reshard.unreadable import refuse_unreadable
from zero_recipes.checkpoint.trust import code_in, refuse_code
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.findings import Refusal, first_line, refusal
from zero_recipes.libs.safe_loading import load_without_code

ADAM_STATES = ("exp_avg", "exp_avg_sq")
HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


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
        raise _damaged(checkpoint, how) from error


def _opened(checkpoint: Path, trusted: bool) -> Source:
    folder = _states_folder(checkpoint)
    files = _optimizer_files(folder)
    model_file = next(iter(sorted(folder.glob("*_model_states.pt"))), None)
    if model_file is None:
        raise _damaged(checkpoint, f"{folder.name} has no *_model_states.pt")
    model = _load(model_file, trusted)
    refuse_unreadable(checkpoint, folder, model)
    if len(files) != model["dp_world_size"]:
        raise _damaged(
            checkpoint, f"{folder.name} has optimizer states of {len(files)} of {model['dp_world_size']} ranks"
        )

    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    stage, steps, groups = 0, set(), []
    for file in files:
        states = _load(file, trusted)["optimizer_state_dict"]
        if "zero_stage" not in states:
            raise refusal("ZR728", checkpoint=checkpoint)
        stage = int(states["zero_stage"])
        base = _base_states(states)
        _refuse_other_optimizers(checkpoint, base, _flat_groups(states))
        steps |= _steps(base)
        if not groups:
            groups = _hyperparameters(base, shapes)
            places = places_of(_flat_groups(states), states, stage, len(files), shapes)
    if len(steps) != 1:
        raise _damaged(checkpoint, f"Adam's step counters differ between groups or ranks: {sorted(steps)}")
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
                raise _damaged(source.checkpoint, f"{source.files[rank].name} is too short for {name}")
            parts[key].append(tensor[start : start + count])
    return {key: torch.cat(pieces).view(place.shape) for key, pieces in parts.items()}


def _load(file: Path, trusted: bool) -> dict[str, Any]:
    try:
        if trusted:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        return load_without_code(file)
    except pickle.UnpicklingError:
        refuse_code(file.parents[1], code_in(file.parents[1]))
        raise _damaged(file.parents[1], f"{file.name} cannot be read") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise _damaged(file.parents[1], f"{file.name} cannot be read: {first_line(error)}") from None


def _damaged(checkpoint: Path, how: str) -> Refusal:
    return refusal("ZR729", checkpoint=checkpoint, how=how)


def _states_folder(checkpoint: Path) -> Path:
    latest = checkpoint / LATEST
    if not latest.is_file():
        raise refusal("ZR730", checkpoint=checkpoint)
    fault = document_fault(checkpoint)
    if fault is not None:
        raise _damaged(checkpoint, fault)
    folder = checkpoint / latest.read_text().strip()
    if not folder.is_dir():
        raise _damaged(checkpoint, f"{folder.name} is missing")
    return folder


def _optimizer_files(folder: Path) -> list[Path]:
    """By rank, as far as they follow each other."""
    found = {}
    for path in folder.iterdir():
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match and int(match[2]) == 0:
            found[int(match[1])] = path
    return [found[rank] for rank in range(len(found)) if rank in found]


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
        raise refusal("ZR736", checkpoint=checkpoint, found=", ".join(sorted(map(str, found))) or "none")


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
