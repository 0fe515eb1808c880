"""An output folder that is safe to write into, and the checkpoint to go on from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from zero_recipes.checkpoint.resume import clear_unfinished, resumes_in
from zero_recipes.checkpoint.saved_files import CHECKSUMS
from zero_recipes.core.errors import Refusal

RESULTS = ("metrics.json", "samples.jsonl", "recipe.resolved.yaml", CHECKSUMS)


def refuse_occupied(output_dir: Path, resume: object, overwrite: bool) -> None:
    """Refuse a folder that holds what an earlier run saved, unless the recipe resumes it or overwrites it."""
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise Refusal(
            "ZR701", f"output_dir {output_dir} cannot be made", f"{existing} is a file.", "Choose another --output_dir."
        )
    found = saved_in(output_dir)
    if not found or overwrite or resumes_in(output_dir, resume):
        return
    raise Refusal(
        "ZR702",
        f"{output_dir} already holds {', '.join(path.name for path in found[:4])}{' ...' if len(found) > 4 else ''}",
        "An earlier run saved it; training into the same folder would mix or destroy it. Nothing has been touched.",
        "Go on from its last checkpoint with --resume_from_checkpoint true, start over with --overwrite true (deletes "
        "the above), or choose another --output_dir.",
    )


def saved_in(output_dir: Path) -> list[Path]:
    """Checkpoints, weights and finished measurements in a folder."""
    if not output_dir.is_dir():
        return []
    checkpoints = sorted(p for p in output_dir.glob("checkpoint-*") if p.is_dir())
    weights = sorted(p for pattern in ("*.safetensors", "pytorch_model*.bin") for p in output_dir.glob(pattern))
    metrics = output_dir / "metrics.json"
    finished = metrics.is_file() and json.loads(metrics.read_text()).get("status") == "ok"
    return checkpoints + weights + ([metrics] if finished else [])


def claim_output_dir(output_dir: Path, overwrite: bool, passed_over: Collection[Path] = ()) -> None:
    """Make the folder this run's: an earlier run's failure files and unfinished checkpoints go, under `overwrite` all
    that it saved. `passed_over`: checkpoints whose contents were found damaged."""
    clear_unfinished(output_dir, passed_over)
    to_delete = list(output_dir.glob("failure.rank*.json"))
    if overwrite:
        to_delete += saved_in(output_dir) + [output_dir / name for name in RESULTS]
        to_delete += list(output_dir.glob("*.safetensors.index.json"))
    for path in to_delete:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
