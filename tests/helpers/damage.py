"""Checkpoints that are damaged on purpose: a small one of a run, bytes of any file, and what a run makes of it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import TrainerControl, TrainerState

from zero_recipes.checkpoint.compatibility import recipe_facts
from zero_recipes.checkpoint.resume import checkpoint_to_resume, step_of
from zero_recipes.checkpoint.save import HISTORY, LATEST, STATE, begin_checkpoint, content_fault, write_manifest
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import library_versions

ZERO2 = Strategy("zero2", 2, DsConfig({"zero_optimization": {"stage": 2}}), "test")
FACTS = {"strategy": "zero2", "zero_stage": 2, "world_size": 2, "precision": "bf16", "micro_batch_size": 2}
FACTS |= {"gradient_accumulation_steps": 4, "recipe_sha256": "r", "data_sha256": "d"}


def small_checkpoint(output_dir: Path, step: int, settings: Settings) -> Path:
    """A checkpoint-N as a run of ZeRO stage 2 on two processes leaves it, of a few hundred bytes a file."""
    folder = output_dir / f"checkpoint-{step}"
    begin_checkpoint(folder)
    states = folder / f"global_step{step}"
    states.mkdir()
    generator = torch.Generator().manual_seed(step)
    for rank in range(2):
        torch.save({"exp_avg": torch.rand(33, generator=generator)}, states / f"zero_pp_rank_{rank}_optim_states.pt")
    torch.save({"module": torch.rand(17, generator=generator)}, states / "mp_rank_00_model_states.pt")
    torch.save({"lr": [0.1 / step]}, folder / "scheduler.pt")
    (folder / "model.safetensors").write_bytes(os.urandom(500))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / LATEST).write_text(states.name)
    logs = [{"loss": 2.5, "step": n + 1} for n in range(step)]
    callbacks = [TrainerControl(should_save=True)]
    state = TrainerState(epoch=0.5, global_step=step, max_steps=9, log_history=logs, stateful_callbacks=callbacks)
    state.save_to_json(str(folder / STATE))
    (folder / HISTORY).write_text(json.dumps({"summary": {"loss_history": [2.5] * step}, "resumed_at": [1]}))
    facts = FACTS | {"step": step, "versions": library_versions(), "recipe": recipe_facts(settings, ZERO2)}
    write_manifest(folder, facts)
    return folder


def taken(output_dir: Path, requested: str = "true") -> str | None:
    """The checkpoint that a run would load, as preflight and resolve_resume_checkpoint look; None: it starts fresh."""
    chosen = checkpoint_to_resume(output_dir, requested)
    while chosen is not None and content_fault(Path(chosen)) is not None:
        chosen = checkpoint_to_resume(output_dir, requested, before=step_of(Path(chosen)))
    if chosen is not None:
        TrainerState.load_from_json(f"{chosen}/{STATE}")
    return chosen


def refusal_of(work: Callable, *arguments, **keywords) -> Refusal | None:
    try:
        work(*arguments, **keywords)
    except Refusal as refusal:
        return refusal
    return None


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(path: Path, draw: random.Random) -> None:
    """A block of zeros, as a file system leaves it that lost a write."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    length = min(draw.choice([1, 64, 512, 4096]), len(data) - start)
    data[start : start + length] = bytes(length) if any(data[start : start + length]) else b"\1" * length
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.choice([1, 100])))


def from_another_step(path: Path, draw: random.Random) -> None:
    """The file of the same name in another checkpoint of the run."""
    step = next(step_of(parent) for parent in path.parents if step_of(parent) > 0)
    other = str(path).replace(f"checkpoint-{step}", f"checkpoint-{step - 1}")
    before = path.read_bytes()
    shutil.copy(other.replace(f"global_step{step}", f"global_step{step - 1}"), path)
    if path.read_bytes() == before:
        flip(path, draw)


def swap(path: Path, draw: random.Random) -> None:
    """Two files of the checkpoint change places."""
    others = [each for each in sorted(path.parent.iterdir()) if each.is_file() and each != path]
    others = [each for each in others if each.read_bytes() != path.read_bytes()]
    if not others:
        return flip(path, draw)
    other, mine = draw.choice(others), path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def lose(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = (flip, zero, cut, grow, from_another_step, swap, lose)
