"""Write recipes/schema.json, with which editors complete a recipe: python scripts/recipe_schema.py [--check]

Made from the dataclasses that parse a recipe: TRL's four and our own. With --check: exits 1 if the file differs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.config import recipe_keys  # noqa: E402
from zero_recipes.config.validation import UNTYPED, accepted_types  # noqa: E402

SCHEMA = ROOT / "recipes" / "schema.json"
NAMES = ("boolean", "integer", "number", "string", "array", "object")


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe: one property a key, no others."""
    properties = {"env": {"type": "object", "description": "Environment variables, set before anything is imported."}}
    hints = recipe_keys.key_types()
    for cls in recipe_keys.dataclasses_of_a_recipe():
        for field in dataclasses.fields(cls):
            if field.init:
                properties[field.name] = property_of(field, hints[field.name])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of zero-recipes: TRL's keys and a few of our own",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }


def property_of(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Types, choices, default and help of one key."""
    described: dict[str, Any] = {}
    takes = accepted_types(hint)
    if "any" not in takes and field.name not in UNTYPED:
        names = [name for name in NAMES if name in takes]
        if names == ["number"]:
            names = ["number", "string"]  # YAML reads 1e-5 as text, TRL as a number
        described["type"] = [*names, "null"]
    choices = field.metadata.get("choices") or [
        member.value
        for part in typing.get_args(hint)
        if isinstance(part, type) and issubclass(part, Enum)
        for member in part
    ]
    if choices:
        described["enum"] = [*choices, None]
    if field.default is not dataclasses.MISSING and isinstance(field.default, (bool, int, float, str)):
        described["default"] = field.default.value if isinstance(field.default, Enum) else field.default
    if "help" in field.metadata:
        described["description"] = " ".join(str(field.metadata["help"]).replace("%%", "%").split())
    return described


def main(arguments: list[str]) -> int:
    text = json.dumps(schema(), indent=1, sort_keys=True) + "\n"
    if "--check" in arguments:
        return int(SCHEMA.read_text() != text)
    SCHEMA.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
