"""Write the recipe that was in force, as one that runs again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.core.files import write_text


def without_tokens(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe as they may be written down: a token that opens the Hub stays with who gave it."""
    kept = {key: value for key, value in keys.items() if key != "hub_token"}
    of_model = kept.get("model_init_kwargs")
    if isinstance(of_model, Mapping) and "token" in of_model:
        kept["model_init_kwargs"] = {key: value for key, value in of_model.items() if key != "token"}
    return kept


def write_resolved(
    explicit: Mapping[str, Any], path: Path, header: list[str], ds_config: dict[str, Any] | None
) -> None:
    """Write what was in force as a recipe that runs again.

    Args:
        explicit: the keys of a Run that were named or derived.
        path: the file to write.
        header: lines for its comment: the launch, and what else a reader may want to know.
        ds_config: the DeepSpeed configuration without "auto"; None without DeepSpeed.
    """
    if "hub_token" in explicit:
        header = [*header, "hub_token is not written: to run this again, set HF_TOKEN"]
    explicit = without_tokens(explicit)
    if ds_config is not None:
        explicit["deepspeed"] = ds_config
    plain = json.loads(json.dumps(explicit, default=str))  # PyYAML writes no members of an enumeration (`debug`)
    text = "".join(f"# {line}\n" for line in header) + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    write_text(path, text)
