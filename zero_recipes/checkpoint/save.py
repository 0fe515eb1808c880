"""The manifest of a checkpoint: what wrote it and which files it has. Written last: without one nothing is whole.

A save begins with the empty file `unfinished` and ends with `manifest.json`, so that three kinds are told apart: a
checkpoint that is whole, one of ours that was not written to its end, and one that another program wrote (neither).

A saved model or adapter: its tensors as the headers of its files describe them, compared with what its class has.

The run checks so what it has saved; `zero-recipes verify` (verify.py) looks at more.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from zero_recipes.core.files import write_json
from zero_recipes.core.findings import first_line

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


SCHEMA = 1
MANIFEST, UNFINISHED = "manifest.json", "unfinished"
STATE, HISTORY, LATEST = "trainer_state.json", "history.json", "latest"
STATES, INDEX_OF_STATES = "zero_states", "zero_states/index.json"  # of a resharded checkpoint
DOCUMENTS = (STATE, HISTORY, LATEST, INDEX_OF_STATES)  # small files that a run reads before it compares all checksums
_PART = MANIFEST + ".part"
_LOADED = (".safetensors", ".safetensors.index.json", ".pt", ".pth", ".bin", ".bin.index.json")


def begin_checkpoint(checkpoint: Path) -> None:
    """A save into this folder begins: until `write`, the checkpoint is known to be unfinished."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / UNFINISHED).touch()
    (checkpoint / MANIFEST).unlink(missing_ok=True)


def write_manifest(checkpoint: Path, facts: dict[str, Any], with_checksums: bool = True) -> None:
    """Write manifest.json after all ranks have written their files; every file reaches the disk before it does.

    `facts`: `compatibility.run_facts` and the step. Checksums are computed while the disk writes, from what the system
    still holds in memory.
    """
    names = [path.relative_to(checkpoint).as_posix() for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    paths = {name: checkpoint / name for name in names if name not in (MANIFEST, UNFINISHED, _PART)}
    digests = {}
    with ThreadPoolExecutor(2 * THREADS) as pool:
        synced = [pool.submit(_sync, path) for path in paths.values()]
        if with_checksums:
            digests = {name: pool.submit(xxh3_128, path) for name, path in paths.items()}
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


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read."""
    found, _ = _read(checkpoint)
    return found


def manifest_facts(checkpoint: Path) -> dict[str, Any]:
    """What a manifest says beside its files; nothing where there is none."""
    of_the_files = ("schema", "files", "checksums", "checksum")
    return {key: value for key, value in (read_manifest(checkpoint) or {}).items() if key not in of_the_files}


def checkpoint_fault(checkpoint: Path) -> str | None:
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
    altered = _altered(checkpoint, different(checkpoint, found["checksums"], DOCUMENTS))
    return altered or document_fault(checkpoint)


def content_fault(checkpoint: Path, share: int = 0, of: int = 1) -> str | None:
    """The first file whose checksum is not the manifest's. Each of `of` processes looks at a `share` of the files."""
    expected = (read_manifest(checkpoint) or {}).get("checksums", {})
    largest_first = sorted(expected, key=lambda name: (-(checkpoint / name).stat().st_size, name))
    return _altered(checkpoint, different(checkpoint, expected, largest_first[share::of]))


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
        for name in (HISTORY, INDEX_OF_STATES):
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


SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
CHECKSUMS = "json"
_SAVED = ("*.safetensors", "*.index.json", "*config.json", "tokenizer*", "vocab*", "merges.txt", "spiece.model")
_SAVED += ("special_tokens_map.json", "added_tokens.json", "chat_template*")


class NotWhole(Exception):
    """A saved model that lacks weights. Raised after training, so it is no Refusal."""


@dataclass(frozen=True)
class Entry:
    """One tensor as a header describes it."""

    file: Path
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def compare_with_class(folder: Path, trust_remote_code: bool = False) -> dict[str, Entry]:
    """Compare a saved model or adapter with its class, built on the meta device; only tied weights may be absent.

    Returns {tensor name: entry}. Raises NotWhole.
    """
    entries = entries_of(folder)
    empty = sorted(name for name, entry in entries.items() if entry.elements == 0)
    if not entries or empty:
        held = f"{empty[0]} is empty ({len(empty)} in all)" if empty else "no weights"
        raise NotWhole(
            f"{folder} holds no whole model: {held}. Under ZeRO stage 3 a save without "
            "stage3_gather_16bit_weights_on_model_save writes empty tensors."
        )
    if (folder / ADAPTER).is_file():
        compare_with_adapter(folder, entries, trust_remote_code)
    else:
        _load_on_meta(folder, trust_remote_code)
    return entries


def entries_of(folder: Path) -> dict[str, Entry]:
    """{tensor name: entry}, from one file or from the shards that an index names. Raises NotWhole."""
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        raise NotWhole(
            f"{folder} is not whole: it holds {SINGLE} and {INDEX}, two models. from_pretrained reads the first; "
            "delete the one that is not meant."
        )
    for name in (ADAPTER, SINGLE):
        if (folder / name).is_file():
            return _read_header(folder / name)
    return _read_shards(folder) if (folder / INDEX).is_file() else {}


def _read_shards(folder: Path) -> dict[str, Entry]:
    try:
        placed = dict(json.loads((folder / INDEX).read_text())["weight_map"])
        shards = sorted(set(placed.values()))
        entries = {name: entry for shard in shards for name, entry in _read_header(folder / shard).items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotWhole(f"{folder / INDEX} cannot be read: {first_line(error)}") from error
    astray = sorted(name for name in placed.keys() | entries.keys() if not _is_placed(name, placed, entries))
    if astray:
        raise NotWhole(
            f"{folder} is not whole: {astray[0]} is not where {INDEX} places it, {placed.get(astray[0])} "
            f"({len(astray)} in all)"
        )
    return entries


def _is_placed(name: str, placed: dict[str, str], entries: dict[str, Entry]) -> bool:
    return name in entries and entries[name].file.name == placed.get(name)


def _read_header(path: Path) -> dict[str, Entry]:
    """safetensors checks that names, shapes and offsets fill the file exactly."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {name: Entry(path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise NotWhole(
            f"{path} is cut off or damaged: {error}. The disk was full or the process was killed while it was written, "
            "or the copy is not complete."
        ) from error


def _load_on_meta(folder: Path, trust_remote_code: bool) -> None:
    """transformers itself matches the names (its renamings and ignore patterns included), so that what is missing here
    is what from_pretrained would invent."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _, report = AutoModelForCausalLM.from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # a config's values reach the model's own code: whatever it raises
        raise NotWhole(f"{folder} has weights, but no model can be made of it: {first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    problems = {kind: set(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    _raise_first(folder, {kind.replace("_", " "): names for kind, names in problems.items()})


def compare_with_adapter(
    folder: Path, entries: dict[str, Entry], trust_remote_code: bool = False, base: str | None = None
) -> None:
    """Every matrix that PEFT would make for its base and no other; a base that is not at hand is not compared with.

    `base`: another than adapter_config.json names. Raises NotWhole.
    """
    from peft import PeftConfig
    from transformers import AutoConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft looks each value up in tables of its own
        raise NotWhole(f"{folder} has an adapter, but its adapter_config.json cannot be read: {error}") from error
    try:
        base = AutoConfig.from_pretrained(
            base or config.base_model_name_or_path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, TypeError):
        return
    try:
        made, optional = _adapter_of(config, base, entries, trust_remote_code)
    except Exception as error:
        raise NotWhole(f"{folder} has an adapter that cannot be put on its base: {first_line(error)}") from error
    shapes = {name for name in made.keys() & entries.keys() if tuple(made[name].shape) != entries[name].shape}
    found = {"missing": made.keys() - entries.keys(), "of another shape": shapes}
    _raise_first(folder, found | {"no part of this adapter:": entries.keys() - made.keys() - optional})


def _adapter_of(config, base, entries: dict[str, Entry], trust_remote_code: bool) -> tuple[dict, set[str]]:
    """(what the adapter's file must hold, names that it may hold): PEFT saves embeddings whose size was changed."""
    from peft import get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base, trust_remote_code=trust_remote_code)
        rows = embedding_rows(entries, model)
        if rows is not None:
            model.resize_token_embeddings(rows, mean_resizing=False)  # for a chat template's tokens
        tuned = get_peft_model(model, config)
    optional = get_peft_model_state_dict(tuned, save_embedding_layers=True).keys()
    return get_peft_model_state_dict(tuned, save_embedding_layers=False), set(optional)


def embedding_rows(entries: dict[str, Entry], model) -> int | None:
    """Of the embeddings in the adapter's file; None where it has none. TRL 1.16 gives the base more rows where its chat
    template comes from another model (`clone_chat_template`), and says so nowhere but in the shapes."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [f".{name}." for name, module in model.named_modules() if any(module is end for end in ends)]
    width = ends[0].weight.shape[1]
    found = {
        entry.shape[0]
        for name, entry in entries.items()
        if any(part in f".{name}" for part in names) and "lora_" not in name and "_delta" not in name
        if len(entry.shape) == 2 and entry.shape[1] == width
    }
    return found.pop() if len(found) == 1 else None


def _raise_first(folder: Path, problems: dict[str, set[str]]) -> None:
    for what, names in problems.items():
        if names:
            raise NotWhole(f"{folder} is not whole: {what} {', '.join(sorted(names)[:3])} ({len(names)} in all)")


def refuse_nonfinite(entries: dict[str, Entry]) -> None:
    """Raise NotWhole where a saved model or adapter holds NaN or infinite numbers."""
    for name, tensor in tensors_of(entries):
        if count := count_nonfinite(tensor):
            raise NotWhole(f"{entries[name].file} is not whole: {name} has {count:,} numbers that are NaN or infinite.")


def tensors_of(entries: dict[str, Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after another, so that no more than one is in memory."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[0])):
        with safe_open(entry.file, "pt") as file:
            yield name, file.get_tensor(name)


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Numbers of a tensor that are NaN or infinite; 0 for one of integers."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:  # torch has no isfinite for 8 bits
        return 0
    return int((~torch.isfinite(tensor)).sum())


def write_checksums(folder: Path) -> None:
    """json: SHA-256 of the weights, configurations and tokenizer that stand in the folder."""
    paths = sorted({path for pattern in _SAVED for path in folder.glob(pattern) if path.is_file()})
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(sha256, paths))
    files = {path.name: digest for path, digest in zip(paths, digests, strict=True)}
    write_json(folder / CHECKSUMS, {"algorithm": "sha256", "files": files})


def is_resharded(checkpoint: str | Path) -> bool:
    return (Path(checkpoint) / INDEX_OF_STATES).is_file()


def read_states_index(checkpoint: str | Path) -> dict[str, Any]:
    """{"adam_step", "source": {"checkpoint", "stage", "world_size"}, "engine": counters and DeepSpeed's scheduler,
    "groups": the optimizer's, each with its hyperparameters and names; "states": "fp32" or "bf16", the dtype of masters
    and moments}."""
    return json.loads((Path(checkpoint) / INDEX_OF_STATES).read_text())
