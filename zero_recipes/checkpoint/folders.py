"""The checkpoints of an output folder: listed by step, rotated while a run saves, and cleared before it begins."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from zero_recipes.checkpoint import save
from zero_recipes.core.process import say


def numbered(output_dir: Path) -> list[Path]:
    """The folders checkpoint-N of an output folder, by step."""
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(checkpoints, key=step_of)


def folder_of_step(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return output_dir / f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """The optimizer steps behind a checkpoint, by its name; -1 of any other folder."""
    named = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(named[1]) if named else -1


def steps_behind(checkpoint: Path) -> int:
    """The optimizer steps behind a checkpoint, by its manifest; by its name where another program wrote it."""
    written = save.read_manifest(checkpoint)
    return step_of(checkpoint) if written is None else written["step"]


def whole_checkpoints(output_dir: Path) -> Iterator[Path]:
    """The checkpoints of an output folder that are whole, the newest first."""
    for checkpoint in reversed(numbered(output_dir)):
        if save.checkpoint_fault(checkpoint) is None:
            yield checkpoint


def rotate(output_dir: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints until `limit` are left; never the newest, nor the `best`.

    They are deleted by step, where transformers goes by time. `limit`: None or 0 keeps all.
    Each one's manifest goes first: one that is half deleted is unfinished.
    """
    if limit is None or limit <= 0:
        return
    numbered_names = {path.name for path in numbered(output_dir)}
    ordered = []
    for path in map(Path, sort_checkpoints(str(output_dir), best_model_checkpoint=best)):
        if path.name in numbered_names:
            ordered.append(path)
    fewest = 1
    if best is not None and Path(best) != ordered[-1]:
        fewest = 2
    for checkpoint in ordered[: -max(limit, fewest)]:
        delete(checkpoint)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, which counts as unfinished from the first moment on."""
    save.begin_checkpoint(checkpoint)
    shutil.rmtree(checkpoint)


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
    """Rename a checkpoint to a name that no run writes to or rotates away."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-again")
    checkpoint.rename(aside)
    say(f"moved aside: {fault} It is now {aside}")
