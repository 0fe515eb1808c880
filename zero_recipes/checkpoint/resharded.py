"""Resharded checkpoints: made where a run has other processes than its checkpoint, loaded, and deleted again.

The folder `zero_states` of one holds index.json (save.read_states_index)
and a safetensors file for each trainable parameter:
the master (fp32), exp_avg and exp_avg_sq, in the parameter's shape and the run's dtype.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.compatibility import needs_reshard, refuse_misfit
from zero_recipes.checkpoint.folders import delete
from zero_recipes.checkpoint.pickles import refuse_code
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.folder_lock import HELD
from zero_recipes.core.process import rank, say
from zero_recipes.engine import deepspeed as internals
from zero_recipes.engine.group import once

ADAM_STATES = ("exp_avg", "exp_avg_sq")
HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


@contextmanager
def resharded_where_needed(run: Run) -> Iterator[Run]:
    """Within it, the run from its checkpoint, or from a copy that is spread over these processes. Collective.

    The caller holds the folder. The copy is deleted where it, or anything inside, is refused.
    """
    if run.checkpoint is None or not needs_reshard(save.read_manifest(Path(run.checkpoint)), run.strategy):
        yield run
        return
    checkpoint = Path(run.checkpoint)
    target = checkpoint.with_name(f"{checkpoint.name}-zero{run.strategy.zero_stage}-world{run.strategy.world_size}")
    run = run.resuming_from(str(target))

    def reshard() -> None:
        _reshard(checkpoint, run, target)
        if not run.settings.trust_checkpoint:
            refuse_code(target)
        refuse_misfit(str(target), run.settings, run.strategy, run.config)

    try:
        once(reshard, f"reshards {checkpoint}")
        yield run
    except Refusal:
        is_own = target.parent.resolve() == run.output_dir.resolve()
        if rank() == 0 and is_own and (target / save.OF_A_RUN).exists():
            shutil.rmtree(target)
        raise


def _reshard(checkpoint: Path, run: Run, target: Path) -> None:
    """Make the copy `target`, in a process of its own. Raises Refusal.

    One that a user made is taken, and one that a run made of this very checkpoint: another run may read it.
    """
    world_size = run.strategy.world_size
    mark = target / save.OF_A_RUN
    made_from = save.read_manifest(checkpoint)["checksum"]
    if target.exists() and not mark.exists():
        save.refuse_not_whole(target, save.checkpoint_fault(target))
        return
    if mark.exists() and mark.read_text() == made_from and save.checkpoint_fault(target) is None:
        return
    shutil.rmtree(target, ignore_errors=True)  # a killed run's; the checkpoint has changed
    command = [sys.executable, "-m", "zero_recipes.tools.main", "reshard", str(checkpoint), "--skip_checksums"]
    command += ["--world_size", str(world_size), "--stage", str(run.strategy.zero_stage)]
    say(f"resharding {checkpoint} for world size {world_size}")
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", HELD: str(run.output_dir.resolve())}
    ended = subprocess.run(command, env=hidden, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    if ended.returncode:
        raise refusal("ZR883", checkpoint=checkpoint, world_size=world_size, error=ended.stderr[-600:].strip())
    mark.write_text(made_from)


def forget_resharded(output_dir: Path) -> None:
    """Delete what runs resharded for themselves, once they have checkpoints of their own."""
    for mark in output_dir.glob(f"checkpoint-*/{save.OF_A_RUN}"):
        delete(mark.parent)


def load_resharded(engine, checkpoint: str | Path) -> None:
    """Load a resharded checkpoint into `engine`, before its first step. Collective.

    Each rank maps one parameter's file after another and copies its own part.
    Raises Refusal on all ranks where the parameters or their groups are not the checkpoint's.
    """
    index = save.read_states_index(checkpoint)
    optimizer = engine.optimizer
    parameters = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad and internals.whole_size(p):
            parameters[name] = p
    _set_hyperparameters(index, optimizer, parameters, checkpoint)
    internals.make_adam_states(optimizer)
    for name, p in parameters.items():
        with safe_open(Path(checkpoint) / save.STATES / f"{name}.safetensors", "pt") as file:
            for key in ("fp32", *ADAM_STATES):
                internals.set_state(p, key, file.get_tensor(key))
    internals.set_adam_step(optimizer, index["adam_step"])
    internals.refresh_weights(optimizer)
    counters = index["engine"]
    for key in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, key, counters[key])
    if engine.lr_scheduler is not None and counters["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(counters["lr_scheduler"])


def _set_hyperparameters(index: dict[str, Any], optimizer, parameters: dict[str, Any], checkpoint: str | Path) -> None:
    """Set what DeepSpeed's load takes from the checkpoint's groups, with the current learning rate.

    transformers loads only the scheduler's counter: until its next step the rate is the group's.
    """
    names = {id(p): name for name, p in parameters.items()}
    groups = []
    for members in internals.members_of_groups(optimizer):
        groups.append(frozenset(names[id(p)] for p in members))
    saved = {frozenset(group["names"]): group for group in index["groups"]}
    strange = set().union(*saved) ^ set(parameters)
    if strange or not saved.keys() >= set(groups):
        first = ", ".join(sorted(strange)[:3]) or "the same, in other groups"
        raise refusal("ZR745", checkpoint=checkpoint, first=first, count=len(strange))
    for target, members in zip(optimizer.param_groups, groups, strict=True):
        group = saved[members]
        for key in HYPERPARAMETERS:
            if key in group:
                target[key] = group[key]
        target["betas"] = tuple(group["betas"])  # JSON knows no tuples
