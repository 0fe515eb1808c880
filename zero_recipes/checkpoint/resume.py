"""Which checkpoint a run resumes from, the last whole one, and how a resharded one is loaded.

A resharded one's folder `zero_states` holds index.json (save.read_states_index)
and a safetensors file for each trainable parameter:
the master (fp32), exp_avg and exp_avg_sq, in the parameter's shape and the run's dtype.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetensors import safe_open

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.compatibility import needs_reshard, refuse_misfit
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.folder_lock import HELD
from zero_recipes.core.process import rank, say
from zero_recipes.core.run_end import UNFINISHED
from zero_recipes.engine import deepspeed as internals
from zero_recipes.engine.group import agree, once
from zero_recipes.engine.huggingface import not_plain

ADAM_STATES = ("exp_avg", "exp_avg_sq")
HYPERPARAMETERS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


def resumes(requested: object) -> bool:
    """Whether `resume_from_checkpoint` names anything. transformers takes "true" for a path."""
    return str(requested).lower() not in ("none", "false")


def requested_in(output_dir: Path, settings: Settings) -> object:
    """`resume_from_checkpoint`. Where the recipe does not say, `true` after a run that a signal or a kill stopped."""
    requested = settings.resume_from_checkpoint
    if requested is not None or settings.overwrite or not numbered(output_dir):
        return requested
    try:
        row = json.loads((output_dir / "metrics.json").read_text())
        was_running = row["status"] == "running" or str(row["error"]).startswith(UNFINISHED)  # schema 2, schema 1
        is_stopped = was_running or row["status"] == "preempted"
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return "true" if is_stopped else None


class Batch(NamedTuple):
    """The sequences of one optimizer step."""

    micro: int
    accumulation: int
    world_size: int

    @property
    def total(self) -> int:
        return self.micro * self.accumulation * self.world_size

    def over(self, world_size: int) -> Self:
        """The same sequences over other processes: this micro batch, or the largest smaller one that fits."""
        if self.total % world_size:
            raise refusal("ZR743", total=self.total, world_size=world_size, old=self)
        each = self.total // world_size
        micro = self.micro
        while each % micro:
            micro -= 1
        return Batch(micro, each // micro, world_size)

    def __str__(self) -> str:
        return f"{self.micro} per device x {self.accumulation} accumulation x {self.world_size} processes"


def requested_batch(settings: Settings) -> list[int | None]:
    return [settings.per_device_train_batch_size, settings.gradient_accumulation_steps, settings.global_batch_size]


def batch_kept(output_dir: Path, requested: object, given: list[int | None], world_size: int) -> dict[str, int] | None:
    """The checkpoint's batch under `true`, over these processes. None where the recipe's own counts."""
    if str(requested).lower() != "true":
        return None
    last = next(whole_checkpoints(output_dir), None)
    written = last and save.read_manifest(last)
    if written is None or written.get("asked") != given:
        return None
    then = Batch(written["micro_batch_size"], written["gradient_accumulation_steps"], written["world_size"])
    batch = then.over(world_size)
    return {"per_device_train_batch_size": batch.micro, "gradient_accumulation_steps": batch.accumulation}


def whole_checkpoints(output_dir: Path) -> Iterator[Path]:
    """The newest first."""
    for checkpoint in reversed(numbered(output_dir)):
        if save.checkpoint_fault(checkpoint) is None:
            yield checkpoint


def resumes_in(output_dir: Path, requested: object) -> bool:
    if str(requested).lower() == "true":
        return True
    return resumes(requested) and Path(str(requested)).resolve().parent == output_dir.resolve()


def numbered(output_dir: Path) -> list[Path]:
    """The folders checkpoint-N, by step."""
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(checkpoints, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps behind it, by its name, or -1."""
    named = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(named[1]) if named else -1


def steps_behind(checkpoint: Path) -> int:
    """The same by its manifest; by its name where another program wrote it."""
    written = save.read_manifest(checkpoint)
    return step_of(checkpoint) if written is None else written["step"]


def checkpoint_to_resume(
    output_dir: Path,
    requested: object,
    overwrite: bool = False,
    damaged: Collection[Path] = (),
    silent: bool = False,
) -> str | None:
    """What `resume_from_checkpoint` means: a path, or `true` for the last whole one in output_dir.

    Where there is none, `true` starts fresh: a pod that restarts runs the same command.
    Touches nothing (`clear_unfinished` does). `damaged`: passed over too. Raises Refusal.
    """
    if not resumes(requested):
        return None
    if overwrite and resumes_in(output_dir, requested):
        raise refusal("ZR703", requested=requested, output_dir=output_dir)
    if str(requested).lower() == "true":
        checkpoint = _last_whole(output_dir, damaged, silent)
    else:
        checkpoint = _named(output_dir, Path(str(requested)))
    if not silent:
        say(f"resuming from {checkpoint}" if checkpoint else f"no checkpoint in {output_dir}: starting fresh")
    return None if checkpoint is None else str(checkpoint)


def _refuse_model_alone(checkpoint: Path) -> None:
    if not save.is_model_alone(checkpoint):
        return
    model = checkpoint
    first = ""
    if (checkpoint / save.ADAPTER).is_file():  # a model cannot be loaded from an adapter and get another one
        model = checkpoint.with_name(f"{checkpoint.name}-export")
        first = f"zero-recipes export {checkpoint}, then "
    raise refusal("ZR178", checkpoint=checkpoint, first=first, model=model)


def _named(output_dir: Path, checkpoint: Path) -> Path:
    _refuse_model_alone(checkpoint)
    _refuse_not_whole(checkpoint, _fault_of_named(checkpoint))
    if not resumes_in(output_dir, checkpoint):
        return checkpoint
    step = steps_behind(checkpoint)
    newer = [path.name for path in whole_checkpoints(output_dir) if step_of(path) > step]
    if newer:  # the run would write into their folders
        raise refusal("ZR710", output_dir=output_dir, newer=", ".join(newer[:4]), step=step)
    return checkpoint


def _last_whole(output_dir: Path, damaged: Collection[Path], silent: bool) -> Path | None:
    for checkpoint in reversed(numbered(output_dir)):
        if checkpoint in damaged:
            continue
        fault = save.checkpoint_fault(checkpoint)
        if fault is None:
            return checkpoint
        _refuse_model_alone(checkpoint)
        if save.is_foreign(checkpoint):
            raise refusal("ZR704", checkpoint=checkpoint)
        if not silent:
            say(f"skipped: {fault}")
    done = [*output_dir.glob("*.safetensors"), *output_dir.glob("pytorch_model*.bin")]
    if done:
        raise refusal("ZR705", output_dir=output_dir, name=done[0].name)
    return None


def _fault_of_named(checkpoint: Path) -> str | None:
    if not save.is_foreign(checkpoint):
        return save.checkpoint_fault(checkpoint)
    if not (checkpoint / save.STATE).is_file():
        return f"There is no {save.STATE} in it, from the working directory {Path.cwd()}."
    return save.document_fault(checkpoint)


def _refuse_not_whole(checkpoint: Path, fault: str | None) -> None:
    if fault is not None:
        raise refusal("ZR707", checkpoint=checkpoint, fault=fault)


def resolve_resume_checkpoint(run: Run) -> Run:
    """The run, from a checkpoint whose contents are what was written. Collective.

    Under `resume_from_checkpoint: true` one whose checksums differ gives way to the one before.
    Touches nothing: the run may still be refused.
    The caller holds the folder. Raises Refusal, the same on all ranks.
    """
    chosen = agree(lambda: run.checkpoint)
    if len(set(chosen)) > 1:
        listed = ", ".join(f"rank {number}: {path or 'starts fresh'}" for number, path in enumerate(chosen))
        raise refusal("ZR711", listed=listed)
    requested = requested_in(run.output_dir, run.recipe.settings)
    share = (rank(), len(chosen))
    damaged: list[Path] = []
    while run.checkpoint is not None and not run.settings.skip_checksums:
        checkpoint = Path(run.checkpoint)
        fault = next(filter(None, agree(partial(save.content_fault, checkpoint, *share))), None)
        if fault is None:
            break
        if str(requested).lower() != "true":
            _refuse_not_whole(checkpoint, fault)
        say(f"skipped: {fault}")
        damaged.append(checkpoint)
        earlier = checkpoint_to_resume(run.output_dir, requested, damaged=damaged)
        if earlier is not None:
            refuse_misfit(earlier, run.settings, run.strategy, run.config)
        run = run.resuming_from(earlier)
    if run.checkpoint is not None and not run.settings.trust_checkpoint:  # also of output_dir: it may be a download
        agree(partial(_refuse_code, Path(run.checkpoint), *share))
    return run


@contextmanager
def resharded_where_needed(run: Run) -> Iterator[Run]:
    """The run, from its checkpoint or a copy that is spread over these processes. Collective.

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
            _refuse_code(target)
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
    """One that a user made is taken, and one that a run made of this very checkpoint: another run may read it."""
    world_size = run.strategy.world_size
    mark = target / save.OF_A_RUN
    made_from = save.read_manifest(checkpoint)["checksum"]
    if target.exists() and not mark.exists():
        _refuse_not_whole(target, save.checkpoint_fault(target))
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
        save.begin_checkpoint(mark.parent)
        shutil.rmtree(mark.parent)


def clear_unfinished(output_dir: Path, step: int = 0) -> None:
    """Make room for the checkpoints after `step`, where the run begins. On rank 0, after the last refusal.

    Unfinished ones are deleted: their steps are trained again.
    Damaged ones, which were whole once, are moved aside.
    """
    for checkpoint in numbered(output_dir):
        if checkpoint.is_symlink() or save.is_foreign(checkpoint):
            continue  # no run of ours made it
        if save.is_unfinished(checkpoint):
            say(f"deleted: {checkpoint}, which is incomplete")
            shutil.rmtree(checkpoint)
            continue
        fault = save.checkpoint_fault(checkpoint)
        if fault is None and step_of(checkpoint) > step:  # it was passed over: its contents may be damaged
            fault = save.content_fault(checkpoint)
        if fault is not None:
            _move_aside(checkpoint, fault)


def _move_aside(checkpoint: Path, fault: str) -> None:
    """To a name that no run writes to or rotates away."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-again")
    checkpoint.rename(aside)
    say(f"moved aside: {fault} It is now {aside}")


def _refuse_code(checkpoint: Path, share: int = 0, of: int = 1) -> None:
    """In a checkpoint, and in the best one it names, which a run loads at its end."""
    best = json.loads((checkpoint / save.STATE).read_text()).get("best_model_checkpoint")
    for folder in {checkpoint.resolve(), Path(best or checkpoint).resolve()}:
        _refuse_not_whole(folder, save.document_fault(folder))  # `latest` may name a folder elsewhere
        found = code_in(folder, share, of)
        if found is not None:
            raise code_refusal(checkpoint, found)


def code_refusal(checkpoint: Path, found: str | None) -> Refusal:
    return refusal("ZR780", checkpoint=checkpoint, found=found)


def code_in(folder: Path, share: int = 0, of: int = 1) -> str | None:
    """The first file that cannot be read without running code, and why."""
    for path in _files_below(folder)[share::of]:
        why = not_plain(path)
        if why is not None:
            return f"{path.relative_to(folder)}, which cannot be read as plain data: {why}"
    return None


def _files_below(folder: Path) -> list[Path]:
    """Also through links to folders, which `Path.rglob` does not follow but a load does."""
    files = []
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder around it
            folders.clear()
            continue
        seen.add(real)
        files += [Path(place, name) for name in names]
    return sorted(path for path in files if path.is_file())


# a resharded checkpoint


def load_resharded(engine, checkpoint: str | Path) -> None:
    """Into `engine`, before its first step. Collective.

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
    """What DeepSpeed's load takes from the checkpoint's groups, with the current learning rate.

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
