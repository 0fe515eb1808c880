"""Checkpoints that are whole or recognised as not: written between a mark and a manifest, older ones deleted after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import sort_checkpoints

from zero_recipes.checkpoint.compatibility import recipe_facts
from zero_recipes.checkpoint.resume import numbered
from zero_recipes.checkpoint.save import HISTORY, begin_checkpoint, checkpoint_fault, read_manifest, write_manifest
from zero_recipes.config.run import RunConfig
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import first_line
from zero_recipes.core.host import library_versions
from zero_recipes.distributed.group import rank_0_writes
from zero_recipes.metrics.failure import is_out_of_memory
from zero_recipes.metrics.schema import RunIdentity


class NotSaved(Exception):
    """A checkpoint could not be written. The run ends; the checkpoints before it are as they were."""


def save(
    trainer: Trainer,
    write: Callable[[], None],
    facts: dict[str, Any],
    history: Callable[[], dict[str, Any]],
    with_checksums: bool,
) -> None:
    """A checkpoint of this step, by `write`, the trainer's own, with the run's history and a manifest. Collective.

    transformers 5.23, trainer.py `_save_checkpoint` deletes the oldest checkpoints (`rotate_checkpoints`) when rank 0
    has written its own files, before `on_save` and while other ranks still write theirs: a run killed there has lost
    the last whole checkpoint under save_total_limit: 1. Here rotation comes after the manifest.
    `facts`: of the run, for the manifest; `history`: collective.
    """
    folder, args = Path(trainer.args.output_dir), trainer.args
    checkpoint = folder / f"checkpoint-{trainer.state.global_step}"
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        if args.should_save:
            begin_checkpoint(checkpoint)
        trainer.accelerator.wait_for_everyone()  # no rank writes before the mark stands
        write()
        measured = history()
        trainer.accelerator.wait_for_everyone()  # all ranks have written
        with rank_0_writes():
            if args.should_save:
                write_json(checkpoint / HISTORY, measured)
                write_manifest(checkpoint, {"step": trainer.state.global_step, **facts}, with_checksums)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NotSaved(_not_saved(checkpoint, error)) from error
    finally:
        args.save_total_limit = limit
    with rank_0_writes():
        if args.should_save:
            rotate(folder, limit, trainer.state.best_model_checkpoint)
    trainer.accelerator.wait_for_everyone()


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`; never the newest, nor the best.

    By step, where transformers goes by time, and each one's manifest first: one that is half deleted is unfinished.
    """
    if limit is None or limit <= 0:
        return
    kept = {path.name for path in numbered(folder)}
    ordered = [Path(p) for p in sort_checkpoints(str(folder), best_model_checkpoint=best) if Path(p).name in kept]
    for checkpoint in ordered[: -max(limit, 2 if best is not None and Path(best) != ordered[-1] else 1)]:
        begin_checkpoint(checkpoint)
        shutil.rmtree(checkpoint)


def facts_of(identity: RunIdentity, run: RunConfig | None, data_sha256: str | None) -> dict[str, Any]:
    """What a manifest says of the run that wrote it; without a recipe only what the trainer knows."""
    keys = ("strategy", "zero_stage", "world_size", "precision", "micro_batch_size", "gradient_accumulation_steps")
    facts = {key: getattr(identity, key) for key in keys} | {"versions": library_versions()}
    if run is None:
        return facts
    return facts | {
        "recipe_sha256": run.recipe.sha256,
        "data_sha256": data_sha256,
        "recipe": recipe_facts(run.settings, run.strategy),
    }


def history_of(checkpoint: str | None) -> dict[str, Any]:
    """What a checkpoint carries of the measurements; empty where another program wrote it."""
    path = Path(checkpoint or "") / HISTORY
    return json.loads(path.read_text()) if checkpoint and path.is_file() else {}


def last_whole(output_dir: str) -> str | None:
    """The newest checkpoint of a folder that is whole; None where there is none."""
    whole = [path for path in numbered(Path(output_dir)) if checkpoint_fault(path) is None]
    return str(whole[-1]) if whole else None


def _not_saved(checkpoint: Path, error: Exception) -> str:
    whole = [p for p in numbered(checkpoint.parent) if checkpoint_fault(p) is None]
    free = shutil.disk_usage(checkpoint.parent).free
    size = sum(read_manifest(whole[-1])["files"].values()) if whole else None
    then = "No checkpoint was written before it."
    if whole:
        then = f"{whole[-1]} is whole ({size:,} bytes): --resume_from_checkpoint true goes on from it."
    return (
        f"{checkpoint} could not be saved: {type(error).__name__}: {first_line(error)}. {free:,} bytes are "
        f"free on its disk. {then}"
        " Make room first; save_total_limit: 1 keeps the newest alone."
    )
