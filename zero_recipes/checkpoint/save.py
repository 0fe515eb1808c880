"""Files of a save: the manifest of a checkpoint, the tensors of a model or adapter, and the checksums of both.

A checkpoint begins with the empty file `unfinished` and ends with `manifest.json`. They tell three kinds apart:
a whole one, an unfinished one, and another program's (neither).
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from zero_recipes.core.files import ALSO_LOADED, RECORDS, SAVED, write_json, write_text
from zero_recipes.core.findings import ending
from zero_recipes.core.run_end import RunFailed

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
# files of a model or adapter
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
CHECKSUMS = "checksums.json"
THREADS = 4  # hashing and syncing release the GIL


class NotWhole(RunFailed):
    """A saved model that lacks weights. Raised after training: no Refusal."""


def checksums_of(folder: Path, names: Iterable[str], algorithm: Any = xxhash.xxh3_128) -> dict[str, str | None]:
    """{name: hexadecimal digits}; None of a file that cannot be read.

    xxh3_128 for checkpoints (as fast as memory), "sha256" for models that are handed on.
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
    for name, digits in checksums_of(folder, expected, algorithm).items():
        if digits != expected[name]:
            return name
    return None


# the manifest of a checkpoint


def begin_checkpoint(checkpoint: Path) -> None:
    """It counts as unfinished until `write_manifest`. Also called before one is deleted."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / UNFINISHED).touch()
    (checkpoint / MANIFEST).unlink(missing_ok=True)


def empty_unfinished(checkpoint: Path) -> None:
    """Make the files of a save that failed empty, other ranks' too: nothing reads them.

    They are not deleted: one that is still open would keep its room.
    """
    if not is_unfinished(checkpoint):
        return
    for path in checkpoint.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                os.truncate(path, 0)


def write_manifest(checkpoint: Path, facts: dict[str, Any], with_checksums: bool = True) -> None:
    """After all ranks' files, which reach the disk before it does.

    `facts`: of the run, and the step; or another manifest.
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
    document["checksum"] = _checksum_of(document)
    write_text(checkpoint / MANIFEST, json.dumps(document, indent=2) + "\n")
    for path in (checkpoint / MANIFEST, checkpoint, checkpoint.parent):
        _sync(path)
    (checkpoint / UNFINISHED).unlink(missing_ok=True)


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """None where it is missing or was changed."""
    try:
        found = json.loads((checkpoint / MANIFEST).read_text())
        return found if found["checksum"] == _checksum_of(found) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_unfinished(checkpoint: Path) -> bool:
    """Whether a save of ours did not end."""
    return (checkpoint / UNFINISHED).exists() and not (checkpoint / MANIFEST).exists()


def is_foreign(checkpoint: Path) -> bool:
    """Whether another program wrote it."""
    return not any((checkpoint / name).exists() for name in (UNFINISHED, MANIFEST, HISTORY))


def is_model_alone(checkpoint: Path) -> bool:
    """Whether it is of a run with save_only_model: weights, and no states that a run could go on from."""
    has_states = any(any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "scheduler.pt", "global_step*"))
    has_model = any((checkpoint / name).is_file() for name in (SINGLE, INDEX, ADAPTER))
    return is_foreign(checkpoint) and has_model and not has_states


def checkpoint_fault(checkpoint: Path) -> str | None:
    """The first fault that shows without a look into large files."""
    if is_unfinished(checkpoint):
        return ending("unfinished", checkpoint=checkpoint)
    found = read_manifest(checkpoint)
    if found is None:
        return ending("manifest", checkpoint=checkpoint, name=MANIFEST)
    for name, size in found["files"].items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return ending("size", path=path, size=size)
    return document_fault(checkpoint)


def content_fault(checkpoint: Path, share: int = 0, of: int = 1) -> str | None:
    """The first changed file, by the manifest's checksums. Each of `of` processes reads its `share` of them."""
    found = read_manifest(checkpoint)
    if found is None:
        return None
    checksums = found["checksums"]
    largest_first = sorted(checksums, key=lambda name: (-found["files"][name], name))
    wrong = first_changed(checkpoint, {name: checksums[name] for name in largest_first[share::of]})
    if wrong is None:
        return None
    return ending("content", path=checkpoint / wrong)


def document_fault(checkpoint: Path) -> str | None:
    """The first small file that a resume could not read."""
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
            return ending("document", checkpoint=checkpoint, name=name, error=error)
    return None


def _check_latest(checkpoint: Path, folder: str) -> None:
    """DeepSpeed opens any folder that `latest` names."""
    states = (checkpoint / folder).resolve()
    if states.parent != checkpoint.resolve() or not states.is_dir():
        raise ValueError(f"{states.name[:40]!r} is not a folder of this checkpoint")


def is_resharded(checkpoint: str | Path) -> bool:
    return (Path(checkpoint) / INDEX_OF_STATES).is_file()


def read_states_index(checkpoint: str | Path) -> dict[str, Any]:
    """Of a resharded checkpoint.

    "adam_step"; "source": {"checkpoint", "stage", "world_size"}; "engine": counters and DeepSpeed's scheduler;
    "groups": the optimizer's, with hyperparameters and names; "states": "fp32" or "bf16", of masters and moments.
    """
    return json.loads((Path(checkpoint) / INDEX_OF_STATES).read_text())


def _checksum_of(document: dict[str, Any]) -> str:
    others = {key: value for key, value in document.items() if key != "checksum"}
    return xxhash.xxh3_128(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# a saved model or adapter


@dataclass(frozen=True)
class Entry:
    """A tensor, from its file's header."""

    file: Path
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def compare_with_class(folder: Path, trust_remote_code: bool = False) -> dict[str, Entry]:
    """On the meta device. Only tied weights may be absent. Returns `entries_of`. Raises NotWhole."""
    entries = entries_of(folder)
    if not entries or any(0 in entry.shape for entry in entries.values()):
        raise NotWhole(ending("no_model", folder=folder))
    if (folder / ADAPTER).is_file():
        _compare_with_adapter(folder, entries, trust_remote_code)
    else:
        _load_on_meta(folder, trust_remote_code)
    return entries


def entries_of(folder: Path) -> dict[str, Entry]:
    """{tensor name: entry}. Raises NotWhole: safetensors checks that tensors fill each file exactly."""
    entries = {}
    path = folder / INDEX
    try:
        for path in _tensor_files(folder):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensor = file.get_slice(name)
                    entries[name] = Entry(path, tensor.get_dtype(), tuple(tensor.get_shape()))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotWhole(ending("damaged_file", path=path, error=error)) from error
    return entries


def _tensor_files(folder: Path) -> list[Path]:
    for name in (ADAPTER, SINGLE):
        if (folder / name).is_file():
            return [folder / name]
    if not (folder / INDEX).is_file():
        return []
    shards = json.loads((folder / INDEX).read_text())["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def _load_on_meta(folder: Path, trust_remote_code: bool) -> None:
    """transformers matches the names: what is missing, from_pretrained would invent."""
    from transformers import AutoModelForCausalLM

    try:
        _, report = AutoModelForCausalLM.from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # any kind: a config's values reach the model's code
        raise NotWhole(ending("no_class", folder=folder, error=error)) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _raise_if_any(folder, kind.replace("_", " "), set(map(str, report[kind])))


def _compare_with_adapter(folder: Path, entries: dict[str, Entry], trust_remote_code: bool) -> None:
    """With what PEFT would make. Without the base nothing is compared."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = PeftConfig.from_pretrained(str(folder))
        try:
            base_config = AutoConfig.from_pretrained(config.base_model_name_or_path, local_files_only=True, **trust)
        except (OSError, ValueError, TypeError):
            return
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(base_config, **trust)
            tuned = get_peft_model(base, config)
        made = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    except Exception as error:  # peft looks each value up in tables of its own
        raise NotWhole(ending("no_base", folder=folder, error=error)) from error
    _raise_if_any(folder, "missing", made.keys() - entries.keys())


def _raise_if_any(folder: Path, what: str, names: set[str]) -> None:
    if names:
        first = ", ".join(sorted(names)[:3])
        raise NotWhole(ending("names", folder=folder, what=what, names=first, count=len(names)))


def refuse_bad_numbers(entries: dict[str, Entry], zeros: bool = False) -> None:
    """Raise NotWhole at NaN or infinity, with `zeros` also at a matrix of zeros."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[0])):
        with safe_open(entry.file, "pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() == 1:  # torch has no isfinite for 8 bits
            continue
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            raise NotWhole(ending("not_finite", file=entry.file, name=name, count=count))
        if zeros and tensor.ndim >= 2 and not tensor.any():
            raise NotWhole(ending("zeros", file=entry.file, name=name))


def write_checksums(folder: Path) -> None:
    """Of all that may be loaded as part of the model."""
    _write_checksums(folder, checksums_of(folder, loaded_files(folder), "sha256"), {})


def add_records(folder: Path, names: Iterable[str] = RECORDS) -> None:
    """Also of what a run has written beside its model, once nothing rewrites it."""
    document = _known_checksums(folder)
    if document is not None:
        there = [name for name in names if (folder / name).is_file()]
        _write_checksums(folder, document["files"], document["records"] | checksums_of(folder, there, "sha256"))


def update_records(folder: Path, names: Iterable[str]) -> None:
    """Of those among `names` that a command has written anew."""
    document = _known_checksums(folder)
    if document is not None:
        add_records(folder, [name for name in names if name in document["records"]])


def forget_records(folder: Path) -> None:
    """A run begins to rewrite them."""
    document = _known_checksums(folder)
    if document is not None and document["records"]:
        _write_checksums(folder, document["files"], {})


def checksums_document(files: dict[str, str], records: dict[str, str]) -> dict[str, Any]:
    document = {"algorithm": "sha256", "files": files, "records": records}
    return document | {"checksum": _checksum_of(document)}


def read_checksums(folder: Path) -> dict[str, Any]:
    """{"files", "records"}: SHA-256 by name. Raises OSError, or ValueError where it was changed."""
    document = dict(json.loads((folder / CHECKSUMS).read_text()))
    if "checksum" in document:
        is_whole = document["checksum"] == _checksum_of(document)
    else:  # an earlier version's
        is_whole = "files" in document and document.keys() <= {"algorithm", "files"}
    if not is_whole:
        raise ValueError("it was changed")
    return {"files": dict(document["files"]), "records": dict(document.get("records", {}))}


def _known_checksums(folder: Path) -> dict[str, Any] | None:
    """None where there are none, or damaged ones, which `verify` names."""
    try:
        return read_checksums(folder)
    except (OSError, ValueError, TypeError):
        return None


def _write_checksums(folder: Path, files: dict[str, str], records: dict[str, str]) -> None:
    write_json(folder / CHECKSUMS, checksums_document(files, records))


def added_to_checkpoint(checkpoint: Path) -> list[str]:
    """Files that are not in its manifest."""
    found = read_manifest(checkpoint)
    if found is None:
        return []
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if not path.is_dir()}
    return sorted(names - found["files"].keys() - {MANIFEST, UNFINISHED, OF_A_RUN})


def loaded_files(folder: Path) -> list[str]:
    """All that a library may load from a model's folder."""
    return _named(folder, [*SAVED, *ALSO_LOADED])


def saved_files(folder: Path) -> list[str]:
    return _named(folder, SAVED)


def _named(folder: Path, patterns: Iterable[str]) -> list[str]:
    names = set()
    for pattern in patterns:
        names.update(path.relative_to(folder).as_posix() for path in folder.glob(pattern) if path.is_file())
    return sorted(names)
