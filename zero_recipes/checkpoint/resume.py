"""Which checkpoint a run goes on from: the last whole one. Unfinished ones are passed over; nothing whole is lost."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.documents import STATE, document_fault
from zero_recipes.checkpoint.reshard.load import is_resharded
from zero_recipes.core.findings import refusal
from zero_recipes.core.process import rank


def resumes(requested: object) -> bool:
    """Whether `resume_from_checkpoint` asks for anything. transformers takes the command line's "true" for a path."""
    return str(requested).lower() not in ("none", "false")


def resumes_in(output_dir: Path, requested: object) -> bool:
    """Whether it asks for what stands in output_dir: `true`, or the path of a checkpoint there."""
    text = str(requested).lower()
    return resumes(requested) and (text == "true" or Path(str(requested)).resolve().parent == output_dir.resolve())


def numbered(output_dir: Path) -> list[Path]:
    """The folders checkpoint-N, by step."""
    found = [p for p in output_dir.glob("checkpoint-*") if p.is_dir() and re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that the checkpoint has behind it, by its name; -1 where the name does not say."""
    digits = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(digits[1]) if digits else -1


def no_fault(checkpoint: Path) -> str | None:
    """Nothing more is looked at."""
    return None


def checkpoint_to_resume(
    output_dir: Path,
    requested: object,
    overwrite: bool = False,
    fault_of: Callable[[Path], str | None] = no_fault,
    before: int | None = None,
) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means: a path, or `true` for the last whole one in output_dir.

    `true` where there is none starts fresh and says so: a pod that restarts runs the same command. Nothing is changed
    here (`clear_unfinished` does, once every rank has looked). `fault_of`: what else a checkpoint must be free of;
    `before`: only checkpoints of earlier steps. Raises Refusal.
    """
    if not resumes(requested):
        return None
    if str(requested).lower() != "true":
        checkpoint = Path(str(requested))
        _refuse_unusable(checkpoint, fault_of)
        _refuse_newer(output_dir, checkpoint, overwrite)
    elif overwrite:
        raise refusal("ZR703", output_dir=output_dir)
    else:
        checkpoint = _last_whole(output_dir, fault_of, before)
    if checkpoint is None:
        _say(f"no checkpoint in {output_dir}: starting fresh")
        return None
    _say(f"going on from {checkpoint}")
    return str(checkpoint)


def _last_whole(output_dir: Path, fault_of: Callable[[Path], str | None], before: int | None) -> Path | None:
    for checkpoint in reversed(numbered(output_dir)):
        if before is not None and step_of(checkpoint) >= before:
            continue
        fault = manifest.damage(checkpoint) or fault_of(checkpoint)
        if fault is None:
            return checkpoint
        if manifest.is_foreign(checkpoint):
            raise refusal("ZR704", checkpoint=checkpoint)
        _say(f"passed over: {fault}")
    done = [*output_dir.glob("*.safetensors"), *output_dir.glob("pytorch_model*.bin")]
    if done:
        raise refusal("ZR705", output_dir=output_dir, name=done[0].name)
    return None


def refuse_not_whole(checkpoint: Path, fault: str) -> None:
    """Of a checkpoint that is named by its path. Raises Refusal."""
    raise refusal("ZR707", checkpoint=checkpoint, fault=fault, another=_another(checkpoint))


def _another(checkpoint: Path) -> str:
    whole = [p.name for p in numbered(checkpoint.parent) if p != checkpoint and manifest.damage(p) is None]
    there = f"{checkpoint.parent} has: {', '.join(whole) or 'none'}"
    return f"--resume_from_checkpoint true takes the last whole one in output_dir ({there})."


def _refuse_unusable(checkpoint: Path, fault_of: Callable[[Path], str | None]) -> None:
    """Of a checkpoint that is named by its path."""
    if not checkpoint.is_dir():
        raise refusal("ZR706", checkpoint=checkpoint, cwd=Path.cwd(), another=_another(checkpoint))
    foreign = manifest.is_foreign(checkpoint)
    fault = (document_fault(checkpoint) if foreign else manifest.damage(checkpoint)) or fault_of(checkpoint)
    if fault is None and foreign and not (checkpoint / STATE).is_file():
        fault = f"{checkpoint} has no {STATE}: nothing says how many steps it has behind it."
    if fault is not None:
        refuse_not_whole(checkpoint, fault)
    states = [*checkpoint.glob("optimizer.pt"), *checkpoint.glob("optimizer.bin"), *checkpoint.glob("global_step*")]
    if not states and not is_resharded(checkpoint):
        raise refusal("ZR708", checkpoint=checkpoint)


def _refuse_newer(output_dir: Path, checkpoint: Path, overwrite: bool) -> None:
    """Going on from an earlier step writes into the folders of later checkpoints, and overwrite deletes this one."""
    if not resumes_in(output_dir, checkpoint):
        return  # refuse_occupied sees to it that nothing stands there
    if overwrite:
        raise refusal("ZR709", checkpoint=checkpoint, output_dir=output_dir)
    found = manifest.read(checkpoint)
    step = step_of(checkpoint) if found is None else found["step"]
    newer = [p.name for p in numbered(output_dir) if step_of(p) > step and manifest.damage(p) is None]
    if newer:
        raise refusal("ZR710", output_dir=output_dir, newer=", ".join(newer[:4]), step=step)


def clear_unfinished(output_dir: Path, passed_over: Collection[Path] = ()) -> None:
    """Make room for the checkpoints to come, on rank 0 once every rank has chosen the one to go on from.

    Unfinished ones are deleted: nobody can go on from them, and their steps are trained again, bit for bit. Damaged
    ones were whole once: they are kept under a name that no run writes to or rotates away. `passed_over`: those whose
    contents were found damaged.
    """
    for checkpoint in numbered(output_dir):
        if checkpoint.is_symlink():
            continue  # no run of ours made it
        if manifest.is_unfinished(checkpoint):
            _say(f"deleted: {checkpoint}, which was not written to its end")
            shutil.rmtree(checkpoint)
        elif not manifest.is_foreign(checkpoint) and (checkpoint in passed_over or manifest.damage(checkpoint)):
            fault = manifest.damage(checkpoint) or f"{checkpoint} is not what was written."
            aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-again")
            _say(f"moved aside: {fault} It is now {aside}")
            checkpoint.rename(aside)


def refuse_different_checkpoints(checkpoint: str | None) -> None:
    """Refuse ranks that would go on from different checkpoints. Collective: every rank calls it."""
    found = gathered(checkpoint)
    if len(set(found)) > 1:
        listed = ", ".join(f"rank {rank}: {path or 'starts fresh'}" for rank, path in enumerate(found))
        raise refusal("ZR711", listed=listed)


def gathered(mine: Any) -> list[Any]:
    """What each rank has, by rank, before TrainingArguments exist (accelerate's gather_object needs them)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def passed_over(output_dir: Path, requested: object, chosen: str | None) -> list[Path]:
    """The checkpoints in output_dir that are later than the one that was chosen there: none of them is whole."""
    if not resumes_in(output_dir, requested):
        return []
    step = -1 if chosen is None else step_of(Path(chosen))
    return [checkpoint for checkpoint in numbered(output_dir) if step_of(checkpoint) > step]


def _say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)
