"""What stands in a checkpoint's large files, looked at by all ranks together before any of it is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch.distributed as dist

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.compatibility import fit_findings
from zero_recipes.checkpoint.documents import STATE, read_json
from zero_recipes.checkpoint.resume import (
    checkpoint_to_resume,
    gathered,
    refuse_different_checkpoints,
    refuse_not_whole,
    resumes_in,
    step_of,
)
from zero_recipes.checkpoint.trust import refuse_code
from zero_recipes.config.run import RunConfig
from zero_recipes.core.findings import raise_errors
from zero_recipes.core.process import rank
from zero_recipes.libs.safe_loading import not_plain


def settle_checkpoint(run: RunConfig) -> RunConfig:
    """The run, to go on from a checkpoint whose contents are what was written.

    Collective: every rank calls it, and each reads its share of the files. Where `resume_from_checkpoint: true` found
    one whose checksums differ, the one before it is taken, as for one that is cut off. Raises Refusal, the same on all
    ranks.
    """
    refuse_different_checkpoints(run.checkpoint)
    while run.checkpoint is not None:
        checkpoint = Path(run.checkpoint)
        if not (run.settings.trust_checkpoint or resumes_in(run.output_dir, run.checkpoint)):
            refuse_code(checkpoint, _first(_code(checkpoint)))
        fault = None if run.settings.skip_checksums else _first(manifest.content_fault(checkpoint, *_share()))
        if fault is None:
            break
        run = _before(run, checkpoint, fault)
    return run


def _code(checkpoint: Path) -> str | None:
    share, of = _share()
    best = read_json(checkpoint / STATE).get("best_model_checkpoint")  # load_best_model_at_end may load it
    for folder in (checkpoint, *([Path(best)] if best and Path(best).resolve() != checkpoint.resolve() else [])):
        for path in sorted(path for path in folder.rglob("*") if path.is_file())[share::of]:
            why = not_plain(path)
            if why is not None:
                return f"{path.relative_to(folder)}, which cannot be read as plain data: {why}"
    return None


def _before(run: RunConfig, checkpoint: Path, fault: str) -> RunConfig:
    """The run with the last whole checkpoint before this one, if it is one to choose. Raises Refusal."""
    requested = run.recipe.settings.resume_from_checkpoint
    if str(requested).lower() != "true":
        refuse_not_whole(checkpoint, fault)
    if rank() == 0:
        print(f"passed over: {fault}", flush=True)
    earlier = checkpoint_to_resume(run.output_dir, requested, before=step_of(checkpoint))
    if earlier is not None:
        raise_errors(list(fit_findings(earlier, run.settings, run.strategy)))
    return dataclasses.replace(run, settings=run.settings.replace(resume_from_checkpoint=earlier))


def _share() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _first(fault: str | None) -> str | None:
    """The first rank's fault, on every rank. Collective."""
    return next((each for each in gathered(fault) if each is not None), None)
