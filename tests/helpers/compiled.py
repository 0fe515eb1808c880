"""A kernel as torch's extension builder leaves it, without a compiler."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEEPSPEED = Path(importlib.util.find_spec("deepspeed").origin).parent


def write_compiled(folder: Path, deepspeed: str = str(DEEPSPEED)) -> None:
    """A kernel as torch leaves it in `folder`, compiled from the sources of that DeepSpeed."""
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.so").touch()
    (folder / "build.ninja").write_text(f"cflags = -I {deepspeed}/ops/csrc/includes -fPIC\n")
