"""A saved model or adapter: the tensors in its files, and whether they are all that its class has."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from zero_recipes.core.findings import first_line
from zero_recipes.core.run_end import RunFailed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"


class NotWhole(RunFailed):
    """A saved model or checkpoint lacks something, or was changed. Raised after training: no Refusal."""


@dataclass(frozen=True)
class Entry:
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def compare_with_class(folder: Path, trust_remote_code: bool = False) -> dict[str, Entry]:
    """Compare a saved model or adapter with what its class has, on the meta device. Only tied weights may be absent.

    `trust_remote_code`: the class may be code that comes with the model.
    Returns `entries_of`. Raises NotWhole.
    """
    entries = entries_of(folder)
    if not entries or any(0 in entry.shape for entry in entries.values()):
        raise NotWhole(
            f"{folder} has no complete model: no weights, or empty tensors, as ZeRO stage 3 saves them without "
            "stage3_gather_16bit_weights_on_model_save."
        )
    if (folder / ADAPTER).is_file():
        _compare_with_adapter(folder, entries, trust_remote_code)
    else:
        _load_on_meta(folder, trust_remote_code)
    return entries


def entries_of(folder: Path) -> dict[str, Entry]:
    """{tensor name: entry} of a saved model or adapter, from the headers of its files; empty where there is none.

    Raises NotWhole: safetensors checks that the tensors fill each file exactly.
    """
    entries = {}
    path = folder / INDEX
    try:
        for path in _tensor_files(folder):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensor = file.get_slice(name)
                    entries[name] = Entry(path, tensor.get_dtype(), tuple(tensor.get_shape()))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotWhole(f"{path} is truncated or damaged: {first_line(error)}") from error
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
    """Let transformers match the names: what is missing, from_pretrained would invent. Raises NotWhole."""
    from transformers import AutoConfig

    from zero_recipes.model.towers import auto_class

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        _, report = auto_class(config).from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # any kind: a config's values reach the model's code
        raise NotWhole(f"{folder} has weights, but no model can be built from it: {first_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _raise_if_any(folder, kind.replace("_", " "), set(map(str, report[kind])))


def _compare_with_adapter(folder: Path, entries: dict[str, Entry], trust_remote_code: bool) -> None:
    """Compare with what PEFT would make. Nothing is compared where the base is not at hand. Raises NotWhole."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig

    from zero_recipes.model.towers import auto_class

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = PeftConfig.from_pretrained(str(folder))
        try:
            base_config = AutoConfig.from_pretrained(config.base_model_name_or_path, local_files_only=True, **trust)
        except (OSError, ValueError, TypeError):
            return
        with torch.device("meta"):
            base = auto_class(base_config).from_config(base_config, **trust)
            tuned = get_peft_model(base, config)
        made = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    except Exception as error:  # peft looks each value up in tables of its own
        raise NotWhole(f"{folder} has an adapter that does not fit its base model: {first_line(error)}") from error
    _raise_if_any(folder, "missing", made.keys() - entries.keys())


def _raise_if_any(folder: Path, what: str, names: set[str]) -> None:
    if names:
        first = ", ".join(sorted(names)[:3])
        raise NotWhole(f"{folder} is not complete: {what} {first} ({len(names)} in all)")


def refuse_bad_numbers(entries: dict[str, Entry], zeros: bool = False) -> None:
    """Read all tensors, and raise NotWhole at NaN or infinity; with `zeros` also at a matrix of zeros."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[0])):
        with safe_open(entry.file, "pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() == 1:  # torch has no isfinite for 8 bits
            continue
        bad = ~torch.isfinite(tensor) if tensor.ndim else torch.isnan(tensor)  # an infinite number alone is a limit
        count = int(bad.sum())
        if count:
            raise NotWhole(f"{entry.file} is damaged: {name} has {count:,} NaN or infinite values.")
        if zeros and tensor.ndim >= 2 and not tensor.any():
            raise NotWhole(f"{entry.file} is damaged: {name} is all zero.")


def bytes_of(entries: dict[str, Entry]) -> int:
    """The bytes of the files that hold these tensors."""
    files = {entry.file for entry in entries.values()}
    return sum(path.stat().st_size for path in files)
