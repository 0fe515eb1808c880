"""What a checkpoint is: manifest.json, written last, so that a checkpoint without its whole files is known by it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = "manifest.json"


def write(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Write `facts` and the size of every file (bytes, by relative path) into the checkpoint, whole or not at all."""
    files = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != NAME
    }
    unfinished = checkpoint / f"{NAME}.part"
    unfinished.write_text(json.dumps({"schema": 1, **facts, "files": files}, indent=2) + "\n")
    os.replace(unfinished, checkpoint / NAME)


def read(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest; None where the checkpoint has none."""
    path = checkpoint / NAME
    return json.loads(path.read_text()) if path.is_file() else None


def damage(checkpoint: Path) -> str | None:
    """The first file that is missing or has another size than the manifest says; None where all is well."""
    manifest = read(checkpoint)
    for name, size in ({} if manifest is None else manifest["files"]).items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    return None
