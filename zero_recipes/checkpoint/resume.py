"""Which checkpoint a run resumes from, and with which batch."""

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.compatibility import refuse_misfit
from zero_recipes.checkpoint.folders import numbered, step_of, steps_behind, whole_checkpoints
from zero_recipes.checkpoint.pickles import refuse_code
from zero_recipes.checkpoint.saved_model import ADAPTER
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import refusal
from zero_recipes.core.process import rank, say
from zero_recipes.core.run_end import UNFINISHED
from zero_recipes.engine.group import agree


def resumes(requested: object) -> bool:
    """Whether `resume_from_checkpoint` names anything. transformers takes "true" for a path."""
    return str(requested).lower() not in ("none", "false")


def requested_in(output_dir: Path, settings: Settings) -> object:
    """What a run is to resume from: its recipe's `resume_from_checkpoint`.

    Where the recipe does not say, it is `true` after a run that a signal or a kill stopped.
    """
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
        """The batch with the same sequences over other processes. Raises Refusal where they do not divide.

        Its micro batch is this one's, or the largest smaller one that fits.
        """
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
    """The batch that a recipe asks for, as a manifest keeps it: per device, accumulation, global."""
    return [settings.per_device_train_batch_size, settings.gradient_accumulation_steps, settings.global_batch_size]


def batch_kept(output_dir: Path, requested: object, given: list[int | None], world_size: int) -> dict[str, int] | None:
    """The keys for the last checkpoint's batch over these processes, under `true`. None where the recipe's own counts.

    `given`: `requested_batch` of this run; where the checkpoint's run was given another, the recipe has changed.
    """
    if str(requested).lower() != "true":
        return None
    last = next(whole_checkpoints(output_dir), None)
    written = last and save.read_manifest(last)
    if written is None or written.get("asked") != given:
        return None
    then = Batch(written["micro_batch_size"], written["gradient_accumulation_steps"], written["world_size"])
    batch = then.over(world_size)
    return {"per_device_train_batch_size": batch.micro, "gradient_accumulation_steps": batch.accumulation}


def resumes_in(output_dir: Path, requested: object) -> bool:
    """Whether the run resumes from a checkpoint of its own output folder."""
    if str(requested).lower() == "true":
        return True
    return resumes(requested) and Path(str(requested)).resolve().parent == output_dir.resolve()


def checkpoint_to_resume(
    output_dir: Path,
    requested: object,
    overwrite: bool = False,
    damaged: Collection[Path] = (),
    silent: bool = False,
) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means: a path, or `true` for the last whole one in output_dir.

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
    if (checkpoint / ADAPTER).is_file():  # a model cannot be loaded from an adapter and get another one
        model = checkpoint.with_name(f"{checkpoint.name}-export")
        first = f"zero-recipes export {checkpoint}, then "
    raise refusal("ZR178", checkpoint=checkpoint, first=first, model=model)


def _named(output_dir: Path, checkpoint: Path) -> Path:
    _refuse_model_alone(checkpoint)
    save.refuse_not_whole(checkpoint, _fault_of_named(checkpoint))
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


def resolve_resume_checkpoint(run: Run) -> Run:
    """Return the run, from a checkpoint whose contents are what was written. Collective.

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
            save.refuse_not_whole(checkpoint, fault)
        say(f"skipped: {fault}")
        damaged.append(checkpoint)
        earlier = checkpoint_to_resume(run.output_dir, requested, damaged=damaged)
        if earlier is not None:
            refuse_misfit(earlier, run.settings, run.strategy, run.config)
        run = run.resuming_from(earlier)
    if run.checkpoint is not None and not run.settings.trust_checkpoint:  # also of output_dir: it may be a download
        agree(partial(refuse_code, Path(run.checkpoint), *share))
    return run
