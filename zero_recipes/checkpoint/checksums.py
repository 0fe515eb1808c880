"""Checksums of files, and checksums.json: those of a saved model and of what its run wrote beside it."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from zero_recipes.core.files import ALSO_LOADED, RECORDS, SAVED, write_json

CHECKSUMS = "checksums.json"
THREADS = 4  # hashing and syncing release the GIL


def checksums_of(folder: Path, names: Iterable[str], algorithm: Any = xxhash.xxh3_128) -> dict[str, str | None]:
    """{name: hexadecimal digits} of files in a folder; None of one that cannot be read.

    `algorithm`: xxh3_128 for checkpoints (as fast as memory), "sha256" for models that are handed on.
    """

    def digits(name: str) -> str | None:
        try:
            with open(folder / name, "rb") as file:
                return hashlib.file_digest(file, algorithm).hexdigest()
        except OSError:
            return None

    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(digits, names), strict=True))


def first_changed(folder: Path, expected: dict[str, str], algorithm: Any = xxhash.xxh3_128) -> str | None:
    """The first file whose checksum is not the expected one, or that is gone; None where there is none."""
    for name, digits in checksums_of(folder, expected, algorithm).items():
        if digits != expected[name]:
            return name
    return None


def checksum_of_document(document: dict[str, Any]) -> str:
    """The checksum of a JSON document, to be kept in it under "checksum"."""
    others = {key: value for key, value in document.items() if key != "checksum"}
    return xxhash.xxh3_128(json.dumps(others, sort_keys=True).encode()).hexdigest()


# checksums.json


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files that may be loaded as part of the model."""
    _write(folder, checksums_of(folder, loaded_files(folder), "sha256"), {})


def add_records(folder: Path, names: Iterable[str] = RECORDS) -> None:
    """Add the checksums of what a run has written beside its model, once nothing rewrites it."""
    document = _known(folder)
    if document is not None:
        there = [name for name in names if (folder / name).is_file()]
        _write(folder, document["files"], document["records"] | checksums_of(folder, there, "sha256"))


def update_records(folder: Path, names: Iterable[str]) -> None:
    """Renew the checksums of those records among `names`, which a command has written anew."""
    document = _known(folder)
    if document is not None:
        add_records(folder, [name for name in names if name in document["records"]])


def forget_records(folder: Path) -> None:
    """Drop the checksums of the records, which a run begins to rewrite."""
    document = _known(folder)
    if document is not None and document["records"]:
        _write(folder, document["files"], {})


def checksums_document(files: dict[str, str], records: dict[str, str]) -> dict[str, Any]:
    """What checksums.json holds: SHA-256 by name, and a checksum of its own."""
    document = {"algorithm": "sha256", "files": files, "records": records}
    return document | {"checksum": checksum_of_document(document)}


def read_checksums(folder: Path) -> dict[str, Any]:
    """{"files", "records"} of checksums.json: SHA-256 by name. Raises OSError, or ValueError where it was changed."""
    document = dict(json.loads((folder / CHECKSUMS).read_text()))
    if "checksum" in document:
        is_whole = document["checksum"] == checksum_of_document(document)
    else:  # an earlier version's
        is_whole = "files" in document and document.keys() <= {"algorithm", "files"}
    if not is_whole:
        raise ValueError("it was changed")
    return {"files": dict(document["files"]), "records": dict(document.get("records", {}))}


def _known(folder: Path) -> dict[str, Any] | None:
    """What checksums.json holds. None where it is missing or damaged, which `verify` names."""
    try:
        return read_checksums(folder)
    except (OSError, ValueError, TypeError):
        return None


def _write(folder: Path, files: dict[str, str], records: dict[str, str]) -> None:
    write_json(folder / CHECKSUMS, checksums_document(files, records))


def loaded_files(folder: Path) -> list[str]:
    """The names of all files that a library may load from a model's folder."""
    return _named(folder, [*SAVED, *ALSO_LOADED])


def saved_files(folder: Path) -> list[str]:
    """The names of the files of a saved model, adapter or tokenizer."""
    return _named(folder, SAVED)


def _named(folder: Path, patterns: Iterable[str]) -> list[str]:
    names = set()
    for pattern in patterns:
        names.update(path.relative_to(folder).as_posix() for path in folder.glob(pattern) if path.is_file())
    return sorted(names)
