"""A saved model or adapter: its tensors as the headers of its files describe them, compared with what its class has.

The run checks so what it has saved; `zero-recipes verify` (verify.py) looks at more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from zero_recipes.checkpoint import checksums
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import first_line

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
CHECKSUMS = "checksums.json"
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
    """checksums.json: SHA-256 of the weights, configurations and tokenizer that stand in the folder."""
    paths = sorted({path for pattern in _SAVED for path in folder.glob(pattern) if path.is_file()})
    with ThreadPoolExecutor(checksums.THREADS) as pool:
        digests = list(pool.map(checksums.sha256, paths))
    files = {path.name: digest for path, digest in zip(paths, digests, strict=True)}
    write_json(folder / CHECKSUMS, {"algorithm": "sha256", "files": files})
