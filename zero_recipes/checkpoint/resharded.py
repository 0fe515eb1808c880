"""Go on from a resharded checkpoint: weights and Adam's states, by parameter name, into a fresh engine of any world.

The folder `zero_states` of such a checkpoint holds one safetensors file for each trainable parameter (the master, named
fp32, exp_avg, exp_avg_sq, in the parameter's shape and the dtype that the run kept them in) and index.json (groups,
Adam's step, the engine's counters).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zero_recipes.core.findings import refusal
from zero_recipes.libs import deepspeed_engine, deepspeed_tensors

FOLDER, INDEX = "zero_states", "index.json"
ADAM_STATES = ("exp_avg", "exp_avg_sq")
HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


def is_resharded(checkpoint: str | Path) -> bool:
    return (Path(checkpoint) / FOLDER / INDEX).is_file()


def read_index(checkpoint: str | Path) -> dict[str, Any]:
    """{"adam_step", "source": {"checkpoint", "stage", "world_size"}, "engine": counters and DeepSpeed's scheduler,
    "groups": the optimizer's, each with its hyperparameters and names; "states": "fp32" or "bf16", the dtype of masters
    and moments}."""
    return json.loads((Path(checkpoint) / FOLDER / INDEX).read_text())


def load(engine, checkpoint: str | Path) -> None:
    """Put a resharded checkpoint's weights, optimizer states and counters into `engine`, before its first step.

    Every rank calls it (collectives at the end). Each reads the mapped files of one parameter after another and copies
    its own part. Raises Refusal, the same on all ranks, where the parameters or their groups are not those of the
    checkpoint.
    """
    from safetensors import safe_open

    index, optimizer = read_index(checkpoint), engine.optimizer
    parameters = {
        name: p for name, p in engine.module.named_parameters() if p.requires_grad and deepspeed_tensors.whole_size(p)
    }
    _set_hyperparameters(index, optimizer, parameters, checkpoint)
    deepspeed_engine.make_adam_states(optimizer)
    for name, p in parameters.items():
        with safe_open(Path(checkpoint) / FOLDER / f"{name}.safetensors", "pt") as file:
            for key in ("fp32", *ADAM_STATES):
                _set(p, key, file.get_tensor(key))
    _set_adam_step(optimizer, index["adam_step"])
    deepspeed_engine.refresh_weights(optimizer)
    for key in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, key, index["engine"][key])
    if engine.lr_scheduler is not None and index["engine"]["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(index["engine"]["lr_scheduler"])


def _set(p: torch.nn.Parameter, key: str, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole master or moment ("fp32", "exp_avg", "exp_avg_sq") to where it belongs.

    At stage 3 by DeepSpeed's call for a part: its safe_set_full_fp32_param (0.19.8, zero/stage3.py
    `set_full_hp_param`) does not know that the last part is padded, and fails where the world does not divide the size.
    """
    from deepspeed import utils

    if not deepspeed_tensors.is_partitioned(p):
        if key == "fp32":
            utils.safe_set_full_fp32_param(p, whole)
        else:
            utils.safe_set_full_optimizer_state(p, whole, key)
        return
    part = torch.zeros(p.ds_tensor.numel(), dtype=whole.dtype)
    start = torch.distributed.get_rank(p.ds_process_group) * part.numel()
    mine = whole.flatten()[start : start + part.numel()]
    part[: mine.numel()] = mine
    if key == "fp32":
        utils.safe_set_local_fp32_param(p, part)
    else:
        utils.safe_set_local_optimizer_state(p, part, key)


def _set_hyperparameters(index: dict[str, Any], optimizer, parameters: dict[str, Any], checkpoint: str | Path) -> None:
    """The learning rate of the moment, and what else DeepSpeed's own load takes from the checkpoint's groups.

    transformers makes the scheduler anew and loads its counter only: until its next step the rate is the group's.
    """
    names = {id(p): name for name, p in parameters.items()}
    groups = [{names[id(p)] for p in members} for members in deepspeed_engine.members_of_groups(optimizer)]
    saved = {frozenset(group["names"]): group for group in index["groups"]}
    strange = set().union(*saved) ^ set(parameters)
    if strange or not all(frozenset(group) in saved for group in groups):
        first = ", ".join(sorted(strange)[:3]) or "the same, in other groups"
        raise refusal("ZR745", checkpoint=checkpoint, first=first, count=len(strange))
    for target, members in zip(optimizer.param_groups, groups, strict=True):
        group = saved[frozenset(members)]
        target.update({key: group[key] for key in HYPERPARAMETERS if key in group})
        target["betas"] = tuple(group["betas"])  # JSON knows no tuples


def _set_adam_step(optimizer, step: int) -> None:
    """Each state gets a counter of its own: one that two groups share would count twice in each step."""
    base = deepspeed_tensors.base_optimizer(optimizer)
    for counters in (*base.state.values(), *base.param_groups):  # FusedAdam counts in its groups
        if "step" in counters:
            old = counters["step"]
            counters["step"] = torch.full_like(old, step) if torch.is_tensor(old) else step
