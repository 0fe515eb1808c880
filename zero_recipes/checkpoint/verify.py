"""`zero-recipes verify`: is a saved model, adapter or checkpoint whole?

Headers and checksums are read; `deep` reads the numbers too, one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_recipes.checkpoint.resume import code_in
from zero_recipes.checkpoint.save import (
    ADAPTER,
    CHECKSUMS,
    STATE,
    Entry,
    NotWhole,
    checkpoint_fault,
    compare_with_class,
    content_fault,
    count_nonfinite,
    different,
    is_foreign,
    read_manifest,
    sha256,
    tensors_of,
)
from zero_recipes.core.findings import first_line

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def verify(
    folder: Path, deep: bool = False, skip_checksums: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Compare a saved model or adapter with its class, its tokenizer and its checksums. Of a checkpoint, every file of
    its manifest is there with its size and checksum, and none would run code. `deep`: no NaN, no Inf, no matrix of
    zeros. `trust_remote_code`: the code of a model that brings its own may run.

    Returns {"tensors": count, "parameters": elements, "bytes": size of the weights, "notes": what is no fault, and
    worth knowing}. Raises NotWhole.
    """
    _raise_if(_fault_of_checkpoint(folder, skip_checksums))
    entries = compare_with_class(folder, trust_remote_code)
    notes = _unread_weights(folder, entries)
    if not (folder / ADAPTER).is_file():
        notes += _check_tokenizer(folder, trust_remote_code)
    if not skip_checksums:
        _raise_if(_changed_since_saved(folder))
    if deep:
        for fault in _bad_numbers(entries):
            raise NotWhole(f"{folder} is not whole: {fault}.")
    size = sum(entry.elements * ITEM_BYTES.get(entry.dtype, 1) for entry in entries.values())
    elements = sum(entry.elements for entry in entries.values())
    return {"tensors": len(entries), "parameters": elements, "bytes": size, "notes": notes}


def _raise_if(fault: str | None) -> None:
    if fault is not None:
        raise NotWhole(fault)


def _fault_of_checkpoint(folder: Path, skip_checksums: bool) -> str | None:
    fault = None if is_foreign(folder) else checkpoint_fault(folder)
    if fault is None and not skip_checksums:
        fault = content_fault(folder)
    code = code_in(folder) if fault is None and (folder / STATE).is_file() else None
    if code is not None:
        fault = f"{folder} holds {code}. A pickle can run any program while it is read; it has not been."
    return fault


def _unread_weights(folder: Path, entries: dict[str, Entry]) -> list[str]:
    read = {entry.file.name for entry in entries.values()} | (read_manifest(folder) or {"files": {}})["files"].keys()
    beside = sorted(path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern))
    return [f"{name} beside it is not read" for name in beside if name not in read]


def _check_tokenizer(folder: Path, trust_remote_code: bool) -> list[str]:
    """Raises NotWhole where the tokenizer cannot be read, or the token that ends a text is none of the model's."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    ends, notes = {}, ["no tokenizer lies beside it"]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        rows = getattr(config.get_text_config(), "vocab_size", math.inf)
        ends["config.json"] = config.eos_token_id
        if (folder / "generation_config.json").is_file():
            ends["generation_config.json"] = GenerationConfig.from_pretrained(folder).eos_token_id
        if any((folder / name).is_file() for name in TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
            ends["the tokenizer"] = tokenizer.eos_token_id
            notes = [f"its tokenizer has {len(tokenizer):,} tokens, the model {rows:,} rows for them"]
            notes = notes if len(tokenizer) > rows else []
    except Exception as error:  # the library's parsers raise what they like; tokenizers a bare Exception
        raise NotWhole(f"{folder} is not whole: its tokenizer cannot be read: {first_line(error)}") from error
    for where, found in ends.items():
        beyond = [
            end for end in (found if isinstance(found, list) else [found]) if end is not None and not 0 <= end < rows
        ]
        if beyond:
            named = f"eos_token_id {beyond[0]} of {where} is beyond its {rows:,} tokens"
            raise NotWhole(f"{folder} is not whole: {named}. No text would end.")
    return notes


def _bad_numbers(entries: dict[str, Entry]) -> Iterator[str]:
    for name, tensor in tensors_of(entries):
        if count := count_nonfinite(tensor):
            yield f"{name} has {count:,} numbers that are NaN or infinite"
        elif tensor.is_floating_point() and tensor.ndim >= 2 and not tensor.any():
            yield f"{name} is all zero"


def _changed_since_saved(folder: Path) -> str | None:
    """The first file that is not what checksums.json says; None where all are, or there is no such file."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return None
    try:
        expected: dict[str, Any] = dict(json.loads(path.read_text())["files"])
        wrong = different(folder, expected, sorted(expected), sha256)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return f"{path} cannot be read: {first_line(error)}"
    if wrong is None:
        return None
    how = "is not what was saved: its SHA-256 is another" if (folder / wrong).is_file() else "is not there"
    return f"{folder} is not whole: {wrong} {how}. If that is meant, delete {path}."
