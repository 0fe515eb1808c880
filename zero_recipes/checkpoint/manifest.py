"""The manifest of a checkpoint: what wrote it and which files it has. Written last: without one nothing is whole.

A save begins with the empty file `unfinished` and ends with `manifest.json`, so that three kinds are told apart: a
checkpoint that is whole, one of ours that was not written to its end, and one that another program wrote (neither).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero_recipes.checkpoint import checksums
from zero_recipes.checkpoint.documents import cannot_be_read, document_fault, first_fault, read_json

SCHEMA = 2  # 1: sizes of the files, no checksums
MANIFEST, UNFINISHED = "manifest.json", "unfinished"
_PART = MANIFEST + ".part"
_LOADED = (".safetensors", ".safetensors.index.json", ".pt", ".pth", ".bin", ".bin.index.json")

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(pattern=r"^[^/]+(/[^/]+)*$")]


class _Manifest(BaseModel):
    """Facts may be missing (another program's checkpoint that was resharded); those that are there have their type."""

    model_config = ConfigDict(strict=True, extra="allow")

    schema_: Annotated[int, Field(alias="schema", ge=1, le=SCHEMA)]
    step: Count
    files: dict[Name, Count]
    checksums: dict[Name, Digest] = {}
    checksum: Digest = ""  # of the other keys; the default is not validated
    strategy: str = ""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    world_size: Positive = 1
    precision: str = ""
    micro_batch_size: Positive = 1
    gradient_accumulation_steps: Positive = 1
    versions: dict[str, str | None] = {}
    recipe_sha256: str | None = None
    data_sha256: str | None = None
    recipe: dict[str, Any] = {}


def begin(checkpoint: Path) -> None:
    """A save into this folder begins: until `write`, the checkpoint is known to be unfinished."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / UNFINISHED).touch()
    (checkpoint / MANIFEST).unlink(missing_ok=True)


retire = begin  # before a checkpoint is deleted: a process killed halfway leaves an unfinished one, not a damaged one


def write(checkpoint: Path, facts: dict[str, Any], with_checksums: bool = True) -> None:
    """Write manifest.json after all ranks have written their files; every file reaches the disk before it does.

    `facts`: step, strategy, zero_stage, world_size, precision, micro_batch_size, gradient_accumulation_steps,
    versions, recipe_sha256, data_sha256, and `recipe`: the values that another run is compared with (fit.py).
    Checksums are computed while the disk writes, from what the system still holds in memory.
    """
    names = [path.relative_to(checkpoint).as_posix() for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    paths = {name: checkpoint / name for name in names if name not in (MANIFEST, UNFINISHED, _PART)}
    digests = {}
    with ThreadPoolExecutor(2 * checksums.THREADS) as pool:
        synced = [pool.submit(_sync, path) for path in paths.values()]
        if with_checksums:
            digests = {name: pool.submit(checksums.xxh3_128, path) for name, path in paths.items()}
        for done in synced:
            done.result()
        digests = {name: done.result() for name, done in digests.items()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    document = {"schema": SCHEMA, **facts, "files": sizes, "checksums": digests}
    document["checksum"] = _checksum_of(document)
    with open(checkpoint / _PART, "w") as file:
        file.write(json.dumps(document, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(checkpoint / _PART, checkpoint / MANIFEST)
    (checkpoint / UNFINISHED).unlink(missing_ok=True)
    for folder in (checkpoint, checkpoint.parent):
        _sync(folder)


def read(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read."""
    found, _ = _read(checkpoint)
    return found


def damage(checkpoint: Path) -> str | None:
    """None if the checkpoint is whole, without a look at the contents of its large files. Else its first fault.

    Every file of the manifest is there with its size, none that would be loaded stands beside them, and the small
    files that a run reads (documents.py) say what they can say.
    """
    if is_unfinished(checkpoint):
        return f"{checkpoint} was not written to its end: a process was killed while it saved, or the disk was full."
    found, fault = _read(checkpoint)
    if found is None:
        return fault
    for name, size in found["files"].items():
        path = checkpoint / name
        if not os.path.isfile(path):  # also for a name that no file can have
            return f"{checkpoint} lacks {name[:200]}."
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size:,} bytes; {size:,} were written."
    strange = [path for path in sorted(checkpoint.rglob("*")) if path.name.endswith(_LOADED) and path.is_file()]
    strange = [path for path in strange if path.relative_to(checkpoint).as_posix() not in found["files"]]
    if strange:
        return f"{strange[0]} is no file of this checkpoint: it was put there later, and might be loaded."
    return document_fault(checkpoint, found["step"])


def content_fault(checkpoint: Path, share: int = 0, of: int = 1) -> str | None:
    """The first file whose checksum is not the manifest's. Each of `of` processes looks at a `share` of the files."""
    expected = (read(checkpoint) or {}).get("checksums", {})
    largest_first = sorted(expected, key=lambda name: (-(checkpoint / name).stat().st_size, name))
    wrong = checksums.different(checkpoint, expected, largest_first[share::of])
    return None if wrong is None else f"{checkpoint / wrong} is not what was written: its checksum is another."


def has_checksums(checkpoint: Path) -> bool:
    """Not those of earlier versions, of other programs, and of runs with skip_checksums."""
    return bool((read(checkpoint) or {}).get("checksums"))


def is_unfinished(checkpoint: Path) -> bool:
    """Whether a save of ours into this folder was begun and not ended."""
    return (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def is_foreign(checkpoint: Path) -> bool:
    """Whether another program wrote it: neither ended nor begun by us."""
    return not (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def missing_facts(written: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Those of `keys` that a manifest does not say."""
    return [key for key in keys if key not in written]


def _read(checkpoint: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(the manifest, None), or (None, why there is none)."""
    path = checkpoint / MANIFEST
    if not path.exists():
        return None, f"{checkpoint} has no {MANIFEST}."
    try:
        found = read_json(path)
        _Manifest.model_validate(found)
    except ValidationError as error:
        return None, cannot_be_read(path, first_fault(error))
    except ValueError as error:
        return None, cannot_be_read(path, str(error))
    if (found["schema"] > 1 or "checksum" in found) and found.get("checksum") != _checksum_of(found):
        return None, cannot_be_read(path, "it was changed after it was written")
    return found, None


def _checksum_of(document: dict[str, Any]) -> str:
    others = {key: value for key, value in document.items() if key != "checksum"}
    return xxhash.xxh3_128(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
