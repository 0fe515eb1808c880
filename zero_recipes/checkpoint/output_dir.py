"""An output folder that is safe to write into, and the checkpoint to go on from."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from zero_recipes.checkpoint import overwrite as overwriting
from zero_recipes.checkpoint.resume import clear_unfinished, numbered, resumes_in
from zero_recipes.config.paths_read import Input
from zero_recipes.core.findings import Refusal, refusal

FAILURE = re.compile(r"failure\.rank\d+\.json")


def refuse_occupied(output_dir: Path, resume: object, overwrite: bool, inputs: Sequence[Input] = ()) -> None:
    """Refuse a folder that holds what an earlier run saved, unless the recipe resumes it or overwrites it; and to
    overwrite what the run reads (`inputs`) or what no run of ours wrote. Touches nothing."""
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise refusal("ZR701", output_dir=output_dir, existing=existing)
    if overwrite:
        overwriting.refuse_deleting_inputs(output_dir, inputs)
        return
    for aside in overwriting.interrupted(output_dir):
        raise refusal("ZR749", aside=aside, output_dir=output_dir)
    found = saved_in(output_dir)
    if not found or resumes_in(output_dir, resume):
        return
    fixes = ["Choose another --output_dir"]
    if numbered(output_dir):
        fixes.append("go on from its last checkpoint with --resume_from_checkpoint true")
    if _may_overwrite(output_dir, inputs):
        fixes.append("replace it with --overwrite true (deletes the above once the new run has taken its first step)")
    raise refusal(
        "ZR702",
        output_dir=output_dir,
        found=", ".join(path.name for path in found[:4]),
        what=" ..." if len(found) > 4 else "",
        fixes=", or ".join(fixes),
    )


def _may_overwrite(output_dir: Path, inputs: Sequence[Input]) -> bool:
    try:
        overwriting.refuse_deleting_inputs(output_dir, inputs)
        return True
    except Refusal:
        return False


def saved_in(output_dir: Path) -> list[Path]:
    """Checkpoints, weights and finished measurements in a folder."""
    if not output_dir.is_dir():
        return []
    weights = sorted(p for pattern in ("*.safetensors", "pytorch_model*.bin") for p in output_dir.glob(pattern))
    metrics = [output_dir / "metrics.json"] if overwriting.is_finished(output_dir) else []
    return [*numbered(output_dir), *weights, *metrics]


def claim_output_dir(
    output_dir: Path, overwrite: bool, inputs: Sequence[Input] = (), passed_over: Collection[Path] = ()
) -> Path | None:
    """Make the folder this run's: an earlier run's failure files and unfinished checkpoints go; under `overwrite` all
    that it left is moved aside, into the folder that is returned. `passed_over`: checkpoints whose contents were found
    damaged."""
    overwriting.recover(output_dir)
    aside = None
    if overwrite:
        overwriting.refuse_deleting_inputs(output_dir, inputs)  # others may have written there meanwhile
        aside = overwriting.move_aside(output_dir)
    clear_unfinished(output_dir, passed_over)
    for path in output_dir.glob("failure.rank*.json"):
        if FAILURE.fullmatch(path.name) and path.is_file():
            path.unlink()
    return aside
