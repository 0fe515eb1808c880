"""Files that are written whole or not at all, and JSON as the standard has it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all: a reader never sees half a file, nor two processes' halves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f"{path.suffix}.{os.getpid()}.part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def write_json(path: Path, document: Any) -> None:
    """The same for what JSON can hold. A number that is not finite becomes null: `NaN` is no JSON."""
    write_text(path, json.dumps(without_nan(document), indent=2, allow_nan=False) + "\n")


def json_lines(rows: list[Any]) -> str:
    """One strict JSON document a line, as `write_json` writes it; letters of every script as they are."""
    return "".join(json.dumps(without_nan(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def without_nan(value: Any) -> Any:
    """The same data with None for every number that strict JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value
