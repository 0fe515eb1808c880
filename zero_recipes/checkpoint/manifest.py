"""The manifest of a checkpoint: what wrote it and which files it has. Written last: without one nothing is whole.

A save begins with the empty file `unfinished` and ends with `manifest.json`, so that three kinds are told apart: a
checkpoint that is whole, one of ours that was not written to its end, and one that another program wrote (neither).
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from zero_recipes.checkpoint import checksums
from zero_recipes.core.findings import first_line

SCHEMA = 1
MANIFEST, UNFINISHED = "manifest.json", "unfinished"
STATE, HISTORY, LATEST, STATES_INDEX = "trainer_state.json", "history.json", "latest", "zero_states/index.json"
DOCUMENTS = (STATE, HISTORY, LATEST, STATES_INDEX)  # small files that a run reads before it compares all checksums
_PART = MANIFEST + ".part"
_LOADED = (".safetensors", ".safetensors.index.json", ".pt", ".pth", ".bin", ".bin.index.json")


def begin(checkpoint: Path) -> None:
    """A save into this folder begins: until `write`, the checkpoint is known to be unfinished."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / UNFINISHED).touch()
    (checkpoint / MANIFEST).unlink(missing_ok=True)


retire = begin  # before a checkpoint is deleted: a process killed halfway leaves an unfinished one, not a damaged one


def write(checkpoint: Path, facts: dict[str, Any], with_checksums: bool = True) -> None:
    """Write manifest.json after all ranks have written their files; every file reaches the disk before it does.

    `facts`: `compatibility.run_facts` and the step. Checksums are computed while the disk writes, from what the system
    still holds in memory.
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


def facts(checkpoint: Path) -> dict[str, Any]:
    """What a manifest says beside its files; nothing where there is none."""
    of_the_files = ("schema", "files", "checksums", "checksum")
    return {key: value for key, value in (read(checkpoint) or {}).items() if key not in of_the_files}


def damage(checkpoint: Path) -> str | None:
    """None if the checkpoint is whole, without a look at the contents of its large files. Else its first fault.

    Every file of the manifest is there with its size, its documents with their checksums, and none that would be
    loaded lies beside them.
    """
    if is_unfinished(checkpoint):
        return f"{checkpoint} was not written to its end: a process was killed while it saved, or the disk was full."
    found, fault = _read(checkpoint)
    if found is None:
        return fault
    for name, size in found["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{checkpoint} lacks {name}."
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size:,} bytes; {size:,} were written."
    strange = [path for path in sorted(checkpoint.rglob("*")) if path.name.endswith(_LOADED) and path.is_file()]
    strange = [path for path in strange if path.relative_to(checkpoint).as_posix() not in found["files"]]
    if strange:
        return f"{strange[0]} is no file of this checkpoint: it was put there later, and might be loaded."
    named = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    if named and int(named[1]) != found["step"]:
        return f"{checkpoint} is the checkpoint of step {found['step']}, by its manifest."
    altered = _altered(checkpoint, checksums.different(checkpoint, found["checksums"], DOCUMENTS))
    return altered or document_fault(checkpoint)


def content_fault(checkpoint: Path, share: int = 0, of: int = 1) -> str | None:
    """The first file whose checksum is not the manifest's. Each of `of` processes looks at a `share` of the files."""
    expected = (read(checkpoint) or {}).get("checksums", {})
    largest_first = sorted(expected, key=lambda name: (-(checkpoint / name).stat().st_size, name))
    return _altered(checkpoint, checksums.different(checkpoint, expected, largest_first[share::of]))


def document_fault(checkpoint: Path) -> str | None:
    """The first small file that a resume could not read, where no checksum shows it; None if there is none.

    transformers reads trainer_state.json once the weights are loaded; DeepSpeed opens the folder that `latest` names,
    wherever that is.
    """
    from transformers import TrainerState

    name = STATE
    try:
        if (checkpoint / STATE).exists() and TrainerState.load_from_json(str(checkpoint / STATE)).global_step < 0:
            raise ValueError("global_step is negative")
        for name in (HISTORY, STATES_INDEX):
            if (checkpoint / name).exists():
                json.loads((checkpoint / name).read_text())
        name = LATEST
        if (checkpoint / LATEST).exists():
            states = (checkpoint / LATEST).read_text().strip()
            if not re.fullmatch(r"[\w.-]*\w[\w.-]*", states) or not (checkpoint / states).is_dir():
                raise ValueError(f"{states[:40]!r} is no folder of this checkpoint")
    except Exception as error:  # whatever the readers of these files raise
        return f"{name} of {checkpoint} cannot be read: {first_line(error)}."
    return None


def is_unfinished(checkpoint: Path) -> bool:
    """Whether a save of ours into this folder was begun and not ended."""
    return (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def is_foreign(checkpoint: Path) -> bool:
    """Whether another program wrote it: neither ended nor begun by us."""
    return not (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def _read(checkpoint: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(the manifest, None), or (None, why there is none)."""
    path = checkpoint / MANIFEST
    if not path.exists():
        return None, f"{checkpoint} has no {MANIFEST}."
    try:
        found = json.loads(path.read_text())
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']}; {SCHEMA} is known")
        if found["checksum"] != _checksum_of(found):
            raise ValueError("it was changed after it was written")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return None, f"{path} cannot be read: {first_line(error)}."
    return found, None


def _altered(checkpoint: Path, name: str | None) -> str | None:
    return None if name is None else f"{checkpoint / name} is not what was written: its checksum is another."


def _checksum_of(document: dict[str, Any]) -> str:
    others = {key: value for key, value in document.items() if key != "checksum"}
    return xxhash.xxh3_128(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
