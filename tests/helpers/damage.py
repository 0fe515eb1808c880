"""Checkpoints that are damaged on purpose: bytes of any file, values of any JSON file, and what a run makes of them."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.compatibility import FACTS, recipe_facts
from zero_recipes.checkpoint.documents import HISTORY, LATEST, STATE
from zero_recipes.checkpoint.reshard.write import reshard
from zero_recipes.checkpoint.resume import checkpoint_to_resume
from zero_recipes.config.settings import Settings
from zero_recipes.core import environment
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.metrics.summary import History, history_fault

# of each JSON type one and more; NaN and 1e999 are what Python's own parser takes
WRONG = [None, True, False, -1, 0, 3, 10**30, -0.5, 2.5, float("nan"), float("inf"), "", "7", "../..", "\udce4", [], {}]
WRONG += [[1], ["a"], [[]], [None], {"a": 1}, {"": []}, {"global_step": 2}]


def small_checkpoint(output_dir: Path, step: int, settings: Settings, schema: int = 2) -> Path:
    """A checkpoint-N as a run of ZeRO stage 2 on two processes leaves it, of a few hundred bytes a file.

    `schema`: of the manifest; 0 for none, as plain transformers leaves it.
    """
    folder = output_dir / f"checkpoint-{step}"
    manifest.begin(folder)
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
    callbacks: list[ExportableState] = [TrainerControl(should_save=True)]
    logs = [{"loss": 2.5, "step": n + 1} for n in range(step)]
    state = TrainerState(epoch=0.5, global_step=step, max_steps=9, log_history=logs, stateful_callbacks=callbacks)
    state.save_to_json(str(folder / STATE))
    evaluation = {"step": 1, "loss": 2.0}
    history = History.model_validate(
        {
            "summary": {"loss_history": [2.5] * step, "tokens": {"all": 9, "non_padding": 8, "supervised": 7}},
            "grad_norm_history": [1.0] * step,
            "eval_history": [evaluation],
            "first_step": 1,
            "resumed_at": [1],
            "answers_before": {"prompts": ["a"], "texts": ["b"], "reference_losses": [None]},
        }
    )
    (folder / HISTORY).write_text(history.model_dump_json())
    facts = dict(zip(FACTS, ("zero2", 2, 2, 2, 4), strict=True)) | {"precision": "bf16", "step": step}
    facts |= {"versions": environment.versions(), "recipe_sha256": "r", "data_sha256": "d"}
    facts |= {"recipe": recipe_facts(settings)}
    manifest.write(folder, facts)
    if schema == 1:
        written = json.loads((folder / manifest.MANIFEST).read_text())
        kept = {key: value for key, value in written.items() if not key.startswith("checksum")}
        (folder / manifest.MANIFEST).write_text(json.dumps(kept | {"schema": 1}))
    elif schema == 0:
        (folder / manifest.MANIFEST).unlink()
    return folder


def taken(output_dir: Path, requested: str, findings: Callable[[str], list]) -> str | None:
    """The checkpoint that a run would load, after all that is read of it before; None where it starts fresh.

    As preflight and settle_checkpoint look, in one process. Raises Refusal.
    """
    chosen = checkpoint_to_resume(output_dir, requested, False, history_fault)
    while chosen is not None and manifest.content_fault(Path(chosen)) is not None:
        if requested != "true":
            raise Refusal([Finding("ZR707", f"{chosen} is not whole", "", "")])
        step = int(chosen.rpartition("-")[2])
        chosen = checkpoint_to_resume(output_dir, requested, False, history_fault, before=step)
    if chosen is not None:
        for finding in findings(chosen):
            if finding.level == "error":
                raise Refusal([finding])
        take_up(Path(chosen))
    return chosen


def take_up(checkpoint: Path) -> None:
    """What transformers and the trainer do with the small files of a checkpoint when they go on from it."""
    state = TrainerState.load_from_json(str(checkpoint / STATE))
    assert state.global_step >= 0 and len(state.log_history) >= 0
    for name, data in state.stateful_callbacks.items():
        for each in data if isinstance(data, list) else [data]:
            arguments, attributes = each.get("args", {}), each.get("attributes", {})
            if name == "TrainerControl":
                TrainerControl(**arguments)
            assert isinstance(attributes, dict)
    if (checkpoint / HISTORY).is_file():
        history = History.model_validate(json.loads((checkpoint / HISTORY).read_text()))
        assert [*history.resumed_at, state.global_step] and history.grad_norm_history is not None


def mutations(document: Any, draw: random.Random, each: int = 6) -> Iterator[tuple[str, Any]]:
    """(what was done, the document): every value at every place replaced by `each` of other kinds, every key gone."""
    for path in _paths(document):
        for value in draw.sample(WRONG, each):
            yield f"{'.'.join(map(str, path))} = {value!r}", _with(document, path, value)
        if path:
            yield f"{'.'.join(map(str, path))} is gone", _without(document, path)


def _paths(document: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from _paths(value, (*path, key))


def _with(document: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _without(document: Any, path: tuple) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return changed


def flip(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"bit in byte {place} flipped"


def zero(path: Path, draw: random.Random) -> str:
    """A block of zeros, as a file system leaves it that lost a write."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    length = min(draw.choice([1, 64, 512, 4096]), len(data) - start)
    if not any(data[start : start + length]):
        data[start] = 1
    else:
        data[start : start + length] = bytes(length)
    path.write_bytes(data)
    return f"{length} bytes from {start} on zeroed"


def cut(path: Path, draw: random.Random) -> str:
    left = draw.randrange(path.stat().st_size)
    os.truncate(path, left)
    return f"cut to {left} bytes"


def grow(path: Path, draw: random.Random) -> str:
    with open(path, "ab") as file:
        file.write(draw.randbytes(draw.choice([1, 100])))
    return "bytes appended"


def from_another_step(path: Path, draw: random.Random) -> str:
    """The file of the same name in another checkpoint of the run."""
    step = int(next(part for part in path.parts if part.startswith("checkpoint-")).rpartition("-")[2])
    other = Path(str(path).replace(f"checkpoint-{step}", f"checkpoint-{step - 1}"))
    other = Path(str(other).replace(f"global_step{step}", f"global_step{step - 1}"))
    before = path.read_bytes()
    shutil.copy(other, path)
    return "of another step" if path.read_bytes() != before else flip(path, draw)


def swap(path: Path, draw: random.Random) -> str:
    """Two files of the checkpoint change places."""
    others = [each for each in sorted(path.parent.iterdir()) if each.is_file() and each != path]
    others = [each for each in others if each.read_bytes() != path.read_bytes()]
    if not others:
        return flip(path, draw)
    other = draw.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"swapped with {other.name}"


def lose(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "deleted"


DAMAGES = (flip, flip, zero, cut, grow, from_another_step, swap, lose)


def damaged(checkpoint: Path, path: Path, draw: random.Random) -> str:
    """Damage one file of a checkpoint at random; what was done."""
    return f"{path.relative_to(checkpoint)}: {draw.choice(DAMAGES)(path, draw)}"


def reshard_refused(checkpoint: Path) -> bool:
    try:
        reshard(checkpoint, 1, 2)
    except Refusal:
        return True
    return False
