"""Files that are damaged on purpose, and the refusal of what finds it."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from zero_recipes.core.findings import Refusal


def refusal_of(work: Callable, *arguments, **keywords) -> Refusal | None:
    try:
        work(*arguments, **keywords)
    except Refusal as refusal:
        return refusal
    return None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def lose(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = (flip, zero, cut, lose)
