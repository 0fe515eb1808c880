"""A saved adapter, compared with what PEFT would make for its base."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_recipes.checkpoint.weights import Entry, NotWhole
from zero_recipes.core.findings import first_line


def compare_with_adapter(
    folder: Path, entries: dict[str, Entry], trust_remote_code: bool, base: str | None = None
) -> None:
    """Every matrix that PEFT would make for this base and no other; without the base, each lora_A has its lora_B.

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
        _say_first(folder, {"missing": _without_partner(entries)})
        return
    try:
        made, optional = _made(config, base, entries, trust_remote_code)
    except Exception as error:
        raise NotWhole(f"{folder} has an adapter that cannot be put on its base: {first_line(error)}") from error
    shapes = {name for name in made.keys() & entries.keys() if tuple(made[name].shape) != entries[name].shape}
    found = {"missing": made.keys() - entries.keys(), "of another shape": shapes}
    found["no part of this adapter:"] = entries.keys() - made.keys() - optional
    _say_first(folder, found)


def _made(config, base, entries: dict[str, Entry], trust_remote_code: bool) -> tuple[dict, set[str]]:
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
    """Of the embeddings that stand in the adapter's file; None where none does. TRL 1.16 gives the base more rows where
    its chat template comes from another model (`clone_chat_template`), and says so nowhere but in the shapes."""
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


def _without_partner(entries: dict[str, Entry]) -> set[str]:
    pairs = {name for name in entries if ".lora_A." in name or ".lora_B." in name}
    wanted = {name.replace(".lora_A.", ".lora_B.") for name in pairs}
    wanted |= {name.replace(".lora_B.", ".lora_A.") for name in pairs}
    return wanted - entries.keys()


def _say_first(folder: Path, found: dict[str, set[str]]) -> None:
    for what, names in found.items():
        if names:
            raise NotWhole(f"{folder} is not whole: {what} {', '.join(sorted(names)[:3])} ({len(names)} in all)")
