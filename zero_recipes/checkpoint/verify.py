"""Is a saved model whole? Headers and checksums are read; `deep` reads the numbers too, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.adapter import compare_with_adapter
from zero_recipes.checkpoint.documents import read_json
from zero_recipes.checkpoint.finite import count_nonfinite
from zero_recipes.checkpoint.saved_files import check_tokenizer, compare_checksums
from zero_recipes.checkpoint.trust import code_in
from zero_recipes.checkpoint.weights import ADAPTER, INDEX, SINGLE, Entry, NotWhole, entries_of, strays
from zero_recipes.core.findings import first_line
from zero_recipes.libs.huggingface import kept_in_fp32

__all__ = ["ADAPTER", "INDEX", "SINGLE", "NotWhole", "verify"]

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
INTEGERS = {"I64", "I32", "I16", "I8", "U8", "BOOL"}
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def verify(
    folder: Path, deep: bool = False, skip_checksums: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Compare a saved model or adapter with its class, built on the meta device.

    transformers itself matches the names (its renamings and ignore patterns included), so that what is missing here is
    what from_pretrained would invent. Only tied weights may be absent. Of a checkpoint, every file of its manifest is
    there with its size and checksum, and none would run code. `deep`: no NaN, no Inf, no matrix of zeros.
    `trust_remote_code`: the code of a model that brings its own may run.
    Returns {"tensors": count, "parameters": elements, "bytes": size of the weights, "notes": what is no fault, and
    worth knowing}. Raises NotWhole.
    """
    if not manifest.is_foreign(folder) and manifest.damage(folder) is not None:
        raise NotWhole(manifest.damage(folder))
    code = code_in(folder) if any(folder.glob("trainer_state.json")) else None
    if code is not None:
        raise NotWhole(f"{folder} holds {code}. A pickle can run any program while it is read; it has not been.")
    fault = None if skip_checksums else manifest.content_fault(folder)
    if fault is not None:
        raise NotWhole(fault)
    entries = entries_of(folder)
    empty = sorted(name for name, entry in entries.items() if entry.elements == 0)
    if not entries or empty:
        raise NotWhole(
            f"{folder} holds no whole model: "
            + (f"{empty[0]} is empty ({len(empty)} in all)" if empty else "no weights")
            + ". Under ZeRO stage 3 a save without stage3_gather_16bit_weights_on_model_save writes empty tensors."
        )
    written = (manifest.read(folder) or {}).get("files", {})
    notes = [f"{name} beside it is not read" for name in strays(folder, entries) if name not in written]
    if (folder / ADAPTER).is_file():
        compare_with_adapter(folder, entries, trust_remote_code)
    else:
        _refuse_endless(folder, entries)
        model = _compare_with_class(folder, trust_remote_code)
        _compare_dtypes(folder, entries, model)
        notes += _architecture(model) + check_tokenizer(folder, model.config, trust_remote_code)
    if not skip_checksums:
        compare_checksums(folder)
    if deep:
        for fault in _bad_numbers(entries):
            raise NotWhole(f"{folder} is not whole: {fault}.")
    size = sum(entry.elements * ITEM_BYTES.get(entry.dtype, 1) for entry in entries.values())
    elements = sum(entry.elements for entry in entries.values())
    return {"tensors": len(entries), "parameters": elements, "bytes": size, "notes": notes}


def _refuse_endless(folder: Path, entries: dict[str, Entry]) -> None:
    """A model is built module by module: a count of layers or experts that has too many digits would take for ever."""
    try:
        config = read_json(folder / "config.json")
    except ValueError as error:
        raise NotWhole(f"{folder} has weights, but no model can be made of it: config.json: {error}") from error
    parts = [config, *config.values()] if isinstance(config, dict) else []
    counts = [item for part in parts if isinstance(part, dict) for item in part.items()]
    for key, count in counts:
        most = len(entries) if "layer" in key else 16 * len(entries) + 4096  # experts of a layer may be one tensor
        if re.search(r"layer|expert|block|depth", key) and isinstance(count, int | float) and count > most:
            raise NotWhole(f"{folder} is not whole: config.json says {key} {count:,}; {len(entries)} tensors are there")


def _compare_with_class(folder: Path, trust_remote_code: bool) -> Any:
    """Names and shapes are the class's. Returns the model, on the meta device."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
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
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = sorted(map(str, report[problem]))
            raise NotWhole(
                f"{folder} is not whole: {problem.replace('_', ' ')} {', '.join(names[:3])} ({len(names)} in all). "
                "from_pretrained would fill them with random numbers."
            )
    return model


def _architecture(model: Any) -> list[str]:
    named, made = model.config.architectures, type(model).__name__
    named = [str(name) for name in (named if isinstance(named, list) else [named])]
    return (
        []
        if named in (["None"], []) or made in named
        else [f"config.json names {', '.join(named)}; AutoModel makes {made} of it"]
    )


def _compare_dtypes(folder: Path, entries: dict[str, Entry], model: Any) -> None:
    """All floating tensors have the config's dtype, but for those that the class keeps in float32; none is of integers
    where the class has numbers."""
    config = read_json(folder / "config.json")  # the model's own has the dtype that it was loaded in
    if config.get("quantization_config") is not None:
        return
    integers = sorted(name for name, entry in entries.items() if _is_integer(name, entry, model))
    if integers:
        raise NotWhole(
            f"{folder} is not whole: {integers[0]} is {entries[integers[0]].dtype} ({len(integers)} in all); the model "
            "has numbers with a fraction there."
        )
    wanted = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    kept = kept_in_fp32(model)
    others = sorted(
        name
        for name, entry in entries.items()
        if entry.dtype in DTYPES.values() and entry.dtype != wanted and not any(part in name for part in kept)
    )
    if wanted is not None and others:
        raise NotWhole(
            f"{folder} is not whole: {others[0]} is {entries[others[0]].dtype} ({len(others)} in all), config.json "
            f"says {wanted}. from_pretrained would convert it silently."
        )


def _is_integer(name: str, entry: Entry, model: Any) -> bool:
    """Of integers where the class has a floating tensor. A name that the file spells otherwise (transformers renames)
    is one of the class's if it is called a weight; buffers of earlier versions are not (masks, positions)."""
    if entry.dtype not in INTEGERS:
        return False
    made = model.state_dict().get(name)
    return made.is_floating_point() if made is not None else re.search(r"(^|\.)weight$", name) is not None


def _bad_numbers(entries: dict[str, Entry]) -> Iterator[str]:
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[0])):
        with safe_open(entry.file, "pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            continue
        if count := count_nonfinite(tensor):
            yield f"{name} has {count:,} numbers that are NaN or infinite"
        elif tensor.ndim >= 2 and not tensor.any():
            yield f"{name} is all zero"
