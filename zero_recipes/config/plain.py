"""Read a recipe of plain values by recipes/schema.json, without TRL's parser, which takes seconds to import.

`read_plain_recipe` gives what read.py's `parse_recipe` gives, or None: where a value is not plain, a key is unknown or
a number out of range, the parser decides, and words what is wrong.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero_recipes.config import keys
from zero_recipes.config.accelerate import LAUNCH_KEYS
from zero_recipes.config.command_line import split_overrides
from zero_recipes.config.read import EXPONENT, converted
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.files import FILES
from zero_recipes.core.measured_on import are_installed

# what the parser makes of defaults that the schema leaves out, or has as text
UNTOLD = {"datasets": [], "include_for_metrics": [], "debug": None, "include_num_input_tokens_seen": False}
PROMPTS = "sample_prompts"  # a list, a number or a path, which the parser never sees
TEXT = {"string", "array", "object"}  # the parser leaves a text alone where a key takes no other type
SWITCHES = {"true": True, "false": False}


class NotPlainError(ValueError):
    """Raised for a value that only TRL's parser can read."""


def read_plain_recipe(path: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> Recipe | None:
    """Merge a recipe's file with the command line. None where TRL's parser has to.

    Args: as of `parse_recipe`.
    """
    if not are_installed(_schema()["x-versions"]):  # other versions have other keys and defaults
        return None
    try:
        explicit = {key: _of_file(key, value) for key, value in mapping.items() if key not in LAUNCH_KEYS}
        for override in split_overrides(overrides):
            explicit[override.key] = _of_command_line(override.key, override.text)
    except NotPlainError:
        return None
    values = converted(default_values() | explicit)
    explicit = {key: values[key] for key in explicit}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Recipe(path, Settings(values), MappingProxyType(explicit), digest)


def default_values() -> dict[str, Any]:
    """The value of every key that nothing names."""
    rows = _schema()["properties"].items()
    return {key: row.get("default") for key, row in rows if key != "env"} | UNTOLD


@cache
def _schema() -> dict[str, Any]:
    return json.loads((FILES / "recipes" / "schema.json").read_text())


def _types_of(key: str) -> set[str]:
    """What a key takes, by JSON's names, without "null". Raises NotPlainError where the schema does not say all."""
    row = _schema()["properties"].get(key, {})
    if "type" not in row or (key in UNTOLD and key != "datasets"):
        raise NotPlainError(key)
    types = set(row["type"]) - {"null"}
    return {"number"} if "number" in types else types  # a text is 1e-5 there


def _of_file(key: str, value: Any) -> Any:
    """The parser's result for a value of the file: all but texts stay as they are."""
    if key == PROMPTS:
        return str(value) if type(value) in (int, float) else value
    types = _types_of(key)
    if value is None:
        is_plain = types <= TEXT
    elif isinstance(value, bool):
        is_plain = types == {"boolean"}
    elif isinstance(value, int):
        is_plain = not types.isdisjoint({"integer", "number"})
    elif isinstance(value, float):
        is_plain = "number" in types
    elif isinstance(value, list):
        is_plain = "array" in types and all(isinstance(entry, dict if key == "datasets" else str) for entry in value)
    elif isinstance(value, dict):
        is_plain = "object" in types
    elif isinstance(value, str):
        return _of_text(key, value, types)
    else:
        is_plain = False
    if not is_plain:
        raise NotPlainError(key)
    return _in_range(key, value)


def _of_text(key: str, text: str, types: set[str]) -> Any:
    """The parser's result for a text of the file: YAML reads 1e-5 as one."""
    if types == {"number"} and EXPONENT.fullmatch(text):
        return _in_range(key, float(text))
    choices = _schema()["properties"][key].get("enum")
    is_mapping = text.lstrip().startswith(("{", "["))
    is_text = types <= TEXT and not types.isdisjoint({"string", "array"}) and key != "datasets"
    if not is_text or is_mapping or (choices and text not in choices):
        raise NotPlainError(key)
    return text


def _of_command_line(key: str, text: str | None) -> Any:
    """The parser's result for one word of the command line."""
    types = _types_of(key)
    if text is None or text.lower() in ("null", "none"):
        raise NotPlainError(key)
    try:
        if types == {"integer"}:
            return _in_range(key, int(text))
        if types == {"number"}:
            return _in_range(key, float(text))
        if types == {"boolean"}:
            return SWITCHES[text]
    except (ValueError, KeyError):
        raise NotPlainError(key) from None
    if "array" in types:  # the parser makes a list of it
        raise NotPlainError(key)
    return _of_text(key, text, types)


def _in_range(key: str, value: Any) -> Any:
    if any(keys.range_findings("", key, value)):
        raise NotPlainError(key)
    return value
