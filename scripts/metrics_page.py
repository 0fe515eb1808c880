"""Write docs/metrics.schema.json and the tables of docs/metrics.md from the models: python scripts/metrics_page.py

--check: exits 1 if a file is not what the models say.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.metrics.failure import RankFailure  # noqa: E402
from zero_recipes.metrics.parts import Part  # noqa: E402
from zero_recipes.metrics.read_runs import SampleRow  # noqa: E402
from zero_recipes.metrics.schema import Metrics  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
SCHEMA = ROOT / "docs" / "metrics.schema.json"
TABLES = {"metrics": Metrics, "failure": RankFailure, "samples": SampleRow}
NAMES = {int: "integer", float: "number", str: "string"}


def schema() -> str:
    """The JSON schema of metrics.json, as text."""
    named = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Metrics.model_json_schema()
    return json.dumps(named | {"title": "metrics.json of zero-recipes"}, indent=1) + "\n"


def page(text: str) -> str:
    """docs/metrics.md with its tables filled in."""
    for name, model in TABLES.items():
        lines = ["| key | type | unit | meaning |", "|---|---|---|---|", *_rows(model)]
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
        table = "\n" + "\n".join(lines) + "\n\n"
        text = re.sub(pattern, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
    return text


def _rows(model: type[Part], prefix: str = "") -> Iterator[str]:
    """One line a key, those of a nested model below it: `peak_memory_bytes[].rss`."""
    for name, field in model.model_fields.items():
        more = field.json_schema_extra or {}
        meaning = field.description + (f"; null {more['null']}" if "null" in more else "")
        key = f"{prefix}{field.alias or name}"
        kind, nested = _kind(field.annotation)
        yield f"| `{key}` | {kind} | {more.get('unit', '')} | {meaning} |"
        if nested is not None:
            yield from _rows(nested, f"{key}[]." if kind.startswith("list") else f"{key}.")


def _kind(hint: Any) -> tuple[str, type[Part] | None]:
    """A type in words, and the model in it."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(part for part in inside if part is not type(None)))
    if origin is typing.Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside), None
    if origin is list:
        kind, nested = _kind(inside[0])
        return f"list of {kind}s", nested
    if origin is dict:
        return f"object of {_kind(inside[1])[0]}s", None
    return ("object", hint) if issubclass(hint, Part) else (NAMES[hint], None)


def main(arguments: list[str]) -> int:
    files = {SCHEMA: schema(), PAGE: page(PAGE.read_text())}
    if "--check" in arguments:
        return int(any(not path.is_file() or path.read_text() != text for path, text in files.items()))
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
