"""The files of a checkpoint, and whether they are those that were written.

A checkpoint begins with the empty file `unfinished` and ends with `manifest.json`. They tell three kinds apart:
a whole one, an unfinished one, and another program's (neither).
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero_recipes.checkpoint.checksums import THREADS, checksum_of_document, checksums_of, first_changed
from zero_recipes.checkpoint.saved_model import ADAPTER, INDEX, SINGLE
from zero_recipes.core.files import write_text
from zero_recipes.core.findings import first_line, refusal

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
STATE = "trainer_state.json"
HISTORY = "history.json"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"  # which DeepSpeed reads instead under checkpoint.load_universal
# of a resharded one
STATES = "zero_states"
INDEX_OF_STATES = "zero_states/index.json"
OF_A_RUN = "of_a_run"  # the mark of one that a run made for itself


def begin_checkpoint(checkpoint: Path) -> None:
    """Mark a checkpoint as unfinished, which it is until `write_manifest`. Also called before one is deleted."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / UNFINISHED).touch()
    (checkpoint / MANIFEST).unlink(missing_ok=True)


def empty_unfinished(checkpoint: Path) -> None:
    """Make the files of a save that failed empty, other ranks' too: nothing reads them, and the disk may be full.

    They are not deleted: one that is still open would keep its room.
    """
    if not is_unfinished(checkpoint):
        return
    for path in checkpoint.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                os.truncate(path, 0)


def write_manifest(checkpoint: Path, facts: dict[str, Any], with_checksums: bool = True) -> None:
    """Make a checkpoint whole: name all its files, with sizes and checksums. They reach the disk before this does.

    Call it once all ranks have written. `facts`: what a resume compares, and the step; or another manifest.
    """
    sizes = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name not in (MANIFEST, UNFINISHED):
            sizes[name] = path.stat().st_size
    digests = {}
    with ThreadPoolExecutor(THREADS) as pool:
        synced = pool.map(_sync, [checkpoint / name for name in sizes])  # the disk writes meanwhile
        if with_checksums:
            digests = checksums_of(checkpoint, sizes)
        list(synced)  # raises what a thread raised
    document = {"schema": 1, **facts, "files": sizes, "checksums": digests}
    document["checksum"] = checksum_of_document(document)
    write_text(checkpoint / MANIFEST, json.dumps(document, indent=2) + "\n")
    for path in (checkpoint / MANIFEST, checkpoint, checkpoint.parent):
        _sync(path)
    (checkpoint / UNFINISHED).unlink(missing_ok=True)


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """What the manifest of a checkpoint says. None where it is missing or was changed."""
    try:
        found = json.loads((checkpoint / MANIFEST).read_text())
        return found if found["checksum"] == checksum_of_document(found) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_unfinished(checkpoint: Path) -> bool:
    """Whether a save of ours did not end."""
    return (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def is_foreign(checkpoint: Path) -> bool:
    """Whether another program wrote this checkpoint."""
    return not any((checkpoint / name).exists() for name in (UNFINISHED, MANIFEST, HISTORY))


def is_model_alone(checkpoint: Path) -> bool:
    """Whether a run with save_only_model wrote it: weights, and no states that a run could go on from."""
    has_states = any(any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "scheduler.pt", "global_step*"))
    has_model = any((checkpoint / name).is_file() for name in (SINGLE, INDEX, ADAPTER))
    return is_foreign(checkpoint) and has_model and not has_states


def checkpoint_fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, as far as it shows without a look into large files. None of a whole one."""
    if is_unfinished(checkpoint):
        return f"{checkpoint} is incomplete: a process was killed while it saved, or the disk was full."
    found = read_manifest(checkpoint)
    if found is None:
        return f"The {MANIFEST} of {checkpoint} is missing or was changed."
    for name, size in found["files"].items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{path} is missing, or does not have the {size:,} bytes that were written."
    return document_fault(checkpoint)


def refuse_not_whole(checkpoint: Path, fault: str | None) -> None:
    """Raise the Refusal of a checkpoint that has this fault; nothing where it has none."""
    if fault is not None:
        raise refusal("ZR707", checkpoint=checkpoint, fault=fault)


def content_fault(checkpoint: Path, share: int = 0, of: int = 1) -> str | None:
    """Which file of a checkpoint was changed, by the checksums of its manifest. None where none was, or none are known.

    Each of `of` processes reads its `share` of the files.
    """
    found = read_manifest(checkpoint)
    if found is None:
        return None
    checksums = found["checksums"]
    largest_first = sorted(checksums, key=lambda name: (-found["files"][name], name))
    wrong = first_changed(checkpoint, {name: checksums[name] for name in largest_first[share::of]})
    if wrong is None:
        return None
    return f"{checkpoint / wrong} was changed after it was written: its checksum differs."


def document_fault(checkpoint: Path) -> str | None:
    """Which small file of a checkpoint a resume could not read, and why. None where it can read all."""
    for name in (LATEST, LATEST_UNIVERSAL, STATE, HISTORY, INDEX_OF_STATES):
        path = checkpoint / name
        try:
            if not path.exists():
                continue
            if name in (LATEST, LATEST_UNIVERSAL):
                _check_latest(checkpoint, path.read_text().strip())
            else:
                dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            return f"{name} of {checkpoint} cannot be read: {first_line(error)}."
    return None


def _check_latest(checkpoint: Path, folder: str) -> None:
    """Raise ValueError where `latest` names no folder within: DeepSpeed opens any."""
    states = (checkpoint / folder).resolve()
    if states.parent != checkpoint.resolve() or not states.is_dir():
        raise ValueError(f"{states.name[:40]!r} is not a folder of this checkpoint")


def added_to_checkpoint(checkpoint: Path) -> list[str]:
    """The files in a checkpoint that its manifest does not name."""
    found = read_manifest(checkpoint)
    if found is None:
        return []
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if not path.is_dir()}
    return sorted(names - found["files"].keys() - {MANIFEST, UNFINISHED, OF_A_RUN})


def is_resharded(checkpoint: str | Path) -> bool:
    """Whether `zero-recipes reshard` wrote it: a file for each parameter, none of DeepSpeed's."""
    return (Path(checkpoint) / INDEX_OF_STATES).is_file()


def read_states_index(checkpoint: str | Path) -> dict[str, Any]:
    """What a resharded checkpoint says of its states.

    "adam_step"; "source": {"checkpoint", "stage", "world_size"}; "engine": counters and DeepSpeed's scheduler;
    "groups": the optimizer's, with hyperparameters and names; "states": "fp32" or "bf16", of masters and moments.
    """
    return json.loads((Path(checkpoint) / INDEX_OF_STATES).read_text())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
