"""The words of a command line that override a recipe's keys: what they name, unset, or give as JSON."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from zero_recipes.config.validation import accepted_types
from zero_recipes.core.findings import first_line, refusal


def refuse_no_text(overrides: list[str]) -> None:
    """Refuse words that are no text: bytes that the terminal's encoding does not know. Raises Refusal."""
    for word in overrides:
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in word):
            raise refusal("ZR156", word=word[:40])


def without_unset(overrides: list[str], known: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """The overrides without those that unset a key (`--max_length null`), and the keys that they unset.

    Only keys that may be null are; `--report_to none` is a value of its own, no callback at all.
    """
    rest, unset, index = [], set(), 0
    while index < len(overrides):
        name, equals, value = overrides[index].partition("=")
        key = name[2:].replace("-", "_") if name.startswith("--") else ""
        width = 1 if equals else 2
        value = value if equals else (overrides[index + 1 : index + 2] or [""])[0]
        is_null = value.lower() == "null" or (value.lower() == "none" and key != "report_to")
        if is_null and key in known and accepted_types(known[key]) & {"null", "any"}:
            unset.add(key)
            index += width
        else:
            rest.append(overrides[index])
            index += 1
    return rest, unset


def decoded(key: str, value: Any) -> Any:
    """A mapping that the command line gives as JSON; anything else as it is. Raises Refusal."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return _as_transformers(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise refusal("ZR157", key=key, value=value[:80], error=first_line(error)) from None


def named_on(overrides: list[str], known: Container[str]) -> set[str]:
    names = {word[2:].partition("=")[0].replace("-", "_") for word in overrides if word.startswith("--")}
    return {name if name in known else name.removeprefix("no_") for name in names}


def _as_transformers(value: Any) -> Any:
    """Texts inside of JSON as transformers 5.23 reads them (training_args.py, _convert_str_dict): "true" is true."""
    if isinstance(value, dict):
        return {key: _as_transformers(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value
