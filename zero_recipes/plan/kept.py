"""What is kept on disk for later plans, by all that it depends on."""

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
from zero_recipes.core.host import library_versions

FOLDER = Path(constants.HF_HOME, "zero-recipes", "plans")


@functools.cache
def versions() -> dict[str, str]:
    """Of the libraries, and a hash of the whole package: a simulation runs its trainer, its probes and its
    configuration, so other code or other tables mean other answers."""
    folder, digest = Path(zero_recipes.__file__).parent, hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.yaml") for path in folder.rglob(kind)):
        digest.update(path.read_bytes())
    return library_versions() | {"zero_recipes": digest.hexdigest()}


def kept(make: Callable[[], Any], *dependencies: Any) -> Any:
    """What `make` returns, as JSON has it; from disk where an earlier program made it of the same `dependencies`."""
    key = hashlib.sha256(json.dumps([*dependencies, versions()], sort_keys=True).encode()).hexdigest()
    path = FOLDER / f"{key}.json"
    with suppress(OSError, ValueError):  # not there, or not whole
        return json.loads(path.read_text())
    text = json.dumps(make(), default=str)
    with suppress(OSError):  # a full or read-only disk costs the next program its time
        write_text(path, text)
    return json.loads(text)
