"""The manifest of a checkpoint: what wrote it and which files it has. Written last: without one nothing is whole.

A save begins with the empty file `unfinished` and ends with `manifest.json`, so that three kinds are told apart: a
checkpoint that is whole, one of ours that was not written to its end, and one that another program wrote (neither).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SCHEMA = 1
MANIFEST, UNFINISHED = "manifest.json", "unfinished"
_PART = MANIFEST + ".part"


def begin(checkpoint: Path) -> None:
    """A save into this folder begins: until `write`, the checkpoint is known to be unfinished."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / UNFINISHED).touch()
    (checkpoint / MANIFEST).unlink(missing_ok=True)


retire = begin  # before a checkpoint is deleted: a process killed halfway leaves an unfinished one, not a damaged one


def write(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Write manifest.json after all ranks have written their files; every file reaches the disk before it does.

    `facts`: step, strategy, zero_stage, world_size, precision, micro_batch_size, gradient_accumulation_steps,
    versions, recipe_sha256, data_sha256, and `recipe`: the values that another run is compared with (fit.py).
    """
    sizes = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.relative_to(checkpoint).as_posix() not in (MANIFEST, UNFINISHED, _PART):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            sizes[path.relative_to(checkpoint).as_posix()] = path.stat().st_size
    document = {"schema": SCHEMA, **facts, "files": sizes}
    with open(checkpoint / _PART, "w") as file:
        file.write(json.dumps(document, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(checkpoint / _PART, checkpoint / MANIFEST)
    (checkpoint / UNFINISHED).unlink(missing_ok=True)
    for folder in (checkpoint, checkpoint.parent):
        _sync_folder(folder)


def read(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read."""
    try:
        found = json.loads((checkpoint / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None


def damage(checkpoint: Path) -> str | None:
    """None if the checkpoint is whole: every file of the manifest is there with its size. Else its first fault."""
    found = read(checkpoint)
    if is_unfinished(checkpoint):
        return f"{checkpoint} was not written to its end: a process was killed while it saved, or the disk was full."
    if found is None:
        broken = (checkpoint / MANIFEST).exists()
        return f"{checkpoint} has {'a manifest.json that cannot be read' if broken else 'no manifest.json'}."
    for name, size in found["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{checkpoint} lacks {name}."
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size:,} bytes; {size:,} were written."
    return None


def is_unfinished(checkpoint: Path) -> bool:
    """Whether a save of ours into this folder was begun and not ended."""
    return (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def is_foreign(checkpoint: Path) -> bool:
    """Whether another program wrote it: neither ended nor begun by us."""
    return not (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
