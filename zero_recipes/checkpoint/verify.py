"""Is a saved model whole? Headers alone are read; `deep` reads the numbers too, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.finite import count_nonfinite, nonfinite
from zero_recipes.compat.huggingface import kept_in_fp32

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


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
        count = 1
        for size in self.shape:
            count *= size
        return count


def verify(folder: Path, deep: bool = False, numbers: bool = False) -> dict[str, int]:
    """Compare a saved model or adapter with its class, built on the meta device.

    transformers itself matches the names (its renamings and ignore patterns included), so that what is missing here is
    what from_pretrained would invent. Only tied weights may be absent. Of a checkpoint, every file of its manifest is
    there with its size. `numbers`: no NaN, no Inf; `deep`: no matrix of zeros either.
    Returns {"tensors": count, "parameters": elements, "bytes": size of the weights}. Raises NotWhole.
    """
    if not manifest.is_foreign(folder) and manifest.damage(folder) is not None:
        raise NotWhole(manifest.damage(folder))
    entries = _entries(folder)
    empty = sorted(name for name, entry in entries.items() if entry.elements == 0)
    if not entries or empty:
        raise NotWhole(
            f"{folder} holds no whole model: "
            + (f"{empty[0]} is empty ({len(empty)} in all)" if empty else "no weights")
            + ". Under ZeRO stage 3 a save without stage3_gather_16bit_weights_on_model_save writes empty tensors."
        )
    if (folder / ADAPTER).is_file():
        _compare_with_adapter(folder, entries)
    else:
        _compare_dtypes(folder, entries, _compare_with_class(folder))
    if deep:
        for fault in _bad_numbers(entries):
            raise NotWhole(f"{folder} is not whole: {fault}.")
    elif numbers:
        for fault in nonfinite({name: entry.file for name, entry in entries.items()}):
            raise NotWhole(f"{folder} is not whole: {fault}.")
    size = sum(entry.elements * ITEM_BYTES.get(entry.dtype, 1) for entry in entries.values())
    return {"tensors": len(entries), "parameters": sum(entry.elements for entry in entries.values()), "bytes": size}


def _entries(folder: Path) -> dict[str, Entry]:
    """{tensor name: entry}, from one file or from the shards that an index names."""
    for name in (ADAPTER, SINGLE):
        if (folder / name).is_file():
            return _read_header(folder / name)
    if not (folder / INDEX).is_file():
        return {}
    try:
        placed = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise NotWhole(f"{folder / INDEX} cannot be read: {error}") from error
    entries: dict[str, Entry] = {}
    for shard in sorted(set(placed.values())):
        if not (folder / shard).is_file():
            raise NotWhole(f"{folder} is not whole: the index names {shard}, which is not there")
        entries |= _read_header(folder / shard)
    astray = sorted(name for name in placed if name not in entries or entries[name].file.name != placed[name])
    strangers = sorted(entries.keys() - placed.keys())
    if astray or strangers:
        first = (
            f"{astray[0]} is not in {placed[astray[0]]}" if astray else f"{strangers[0]} is in no entry of the index"
        )
        raise NotWhole(f"{folder} is not whole: {first} ({len(astray) + len(strangers)} in all)")
    return entries


def _read_header(path: Path) -> dict[str, Entry]:
    """safetensors checks that names, shapes and offsets fill the file exactly."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {name: Entry(path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as error:
        raise NotWhole(
            f"{path} is cut off or damaged: {error}. The disk was full or the process was killed while it was written, "
            "or the copy is not complete."
        ) from error


def _compare_with_class(folder: Path) -> set[str]:
    """Names and shapes are the class's. Returns the parts of names that it keeps in float32 whatever its dtype."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise NotWhole(f"{folder} has weights, but no model can be made of it: {str(error).splitlines()[0]}") from error
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
    return kept_in_fp32(model)


def _compare_dtypes(folder: Path, entries: dict[str, Entry], kept_in_fp32: set[str]) -> None:
    """All floating tensors have the config's dtype; `kept_in_fp32`: parts of names that the class keeps in float32."""
    config = json.loads((folder / "config.json").read_text())
    wanted = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    if wanted is None or "quantization_config" in config:
        return
    others = sorted(
        name
        for name, entry in entries.items()
        if entry.dtype in DTYPES.values() and entry.dtype != wanted and not any(part in name for part in kept_in_fp32)
    )
    if others:
        raise NotWhole(
            f"{folder} is not whole: {others[0]} is {entries[others[0]].dtype} ({len(others)} in all), config.json "
            f"says {wanted}. from_pretrained would convert it silently."
        )


def _compare_with_adapter(folder: Path, entries: dict[str, Entry]) -> None:
    """Every matrix that PEFT would make for this base; without the base, each lora_A has its lora_B."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise NotWhole(f"{folder} has an adapter, but its adapter_config.json cannot be read: {error}") from error
    try:
        base = AutoConfig.from_pretrained(config.base_model_name_or_path, local_files_only=True)
    except (OSError, ValueError):
        pairs = {name for name in entries if ".lora_A." in name or ".lora_B." in name}
        wanted = {name.replace(".lora_A.", ".lora_B.") for name in pairs}
        wanted |= {name.replace(".lora_B.", ".lora_A.") for name in pairs}
        missing, mismatched = sorted(wanted - entries.keys()), []
    else:
        with torch.device("meta"):
            model = get_peft_model(AutoModelForCausalLM.from_config(base), config)
        made = get_peft_model_state_dict(model, save_embedding_layers=False)
        missing = sorted(made.keys() - entries.keys())
        mismatched = sorted(n for n in made.keys() & entries.keys() if tuple(made[n].shape) != entries[n].shape)
    for what, names in (("missing", missing), ("of another shape", mismatched)):
        if names:
            raise NotWhole(f"{folder} is not whole: {what} {', '.join(names[:3])} ({len(names)} in all)")


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
