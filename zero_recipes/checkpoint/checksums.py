"""Checksums of files: xxh3_128 for checkpoints (as fast as memory is read), SHA-256 for models that are handed on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

THREADS = 4  # both release the interpreter's lock while they read


def xxh3_128(path: Path) -> str:
    """Hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def sha256(path: Path) -> str:
    """Hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def different(folder: Path, expected: dict[str, str], names: Iterable[str], checksum=xxh3_128) -> str | None:
    """The first of `names` whose file in `folder` has not the checksum that `expected` has for it; None if all have.

    A file that cannot be read counts as different.
    """
    names = [name for name in names if name in expected]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(partial(_readable, checksum), [folder / name for name in names]))
    return next((name for name, digest in zip(names, found, strict=True) if digest != expected[name]), None)


def _readable(checksum, path: Path) -> str | None:
    try:
        return checksum(path)
    except OSError:
        return None
