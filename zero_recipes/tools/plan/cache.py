"""Results on disk for later plans, by a hash of all that they depend on."""

import functools
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants

import zero_recipes
from zero_recipes.core.files import write_text
from zero_recipes.core.measured_on import library_versions

FOLDER = Path(constants.HF_HOME, "zero-recipes", "plans")
MOST_KEPT = 1000  # files of a folder


@functools.cache
def versions() -> dict[str, str]:
    """Name the versions that an answer depends on: of the libraries, and a hash of the whole package.

    A simulation runs its trainer, probes and configuration.
    """
    folder = Path(zero_recipes.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.yaml")]):
        digest.update(path.read_bytes())
    return library_versions() | {"zero_recipes": digest.hexdigest()}


def cached(make: Callable[[], Any], *dependencies: Any) -> Any:
    """Return what `make` returns, through JSON, or has returned to an earlier program for the same `dependencies`."""
    key = hashlib.sha256(json.dumps([*dependencies, versions()], sort_keys=True).encode()).hexdigest()
    path = FOLDER / f"{key}.json"
    with suppress(OSError, ValueError):  # missing, or incomplete
        return json.loads(path.read_text())
    text = json.dumps(make(), default=str)
    keep(path, text)
    return json.loads(text)


def keep(path: Path, text: str) -> None:
    """Write a result, and delete the oldest beyond MOST_KEPT."""
    with suppress(OSError):  # a full or read-only disk costs the next program its time
        write_text(path, text)
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-MOST_KEPT]:
            old.unlink()
