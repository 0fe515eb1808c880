"""Numbers in a page's text that come from benchmarks/results/, each with a marker that names its file and key.

A marker is an HTML comment directly after its number, which no reader of the page sees:

    The run took 121.0<!-- from gpu_h200.json rows/case=n1-m69-zero3/measured/allocated_peak_bytes / 1e9 --> GB.

After the file comes the key: the names of keys from the outermost on, with / between them. In a list, a step is the
number of the entry, or FIELD=VALUE: the first entry whose field has this value (several with commas: a=1,b=2). Then
may come `/ 1e9` or `* 100`, with spaces around it. Before the file may stand `count`, `median`, `min` or `max` of a
list; a step * in the key makes one of all entries. A number keeps the decimals and the sign that it is written with.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
NUMBER = r"(?<![\w.,+-])(?P<sign>[+-]?)(?P<digits>\d[\d,]*(?:\.(?P<decimals>\d+))?)"
# code is left alone: a comment would be seen there
CODE = r"```.*?```|`[^`\n]*`"
MARKED = re.compile(rf"{CODE}|(?:{NUMBER})?<!--\s+from\s+(?P<source>.*?)\s*-->", re.DOTALL)
SOURCE = re.compile(
    r"(?:(?P<combine>count|median|min|max) )?(?P<file>\S+) (?P<key>.+?)(?: (?P<operator>[/*]) (?P<factor>\S+))?"
)
COMBINE = {None: lambda value: value, "count": len, "median": statistics.median, "min": min, "max": max}


def with_numbers(page: str, results: Path = RESULTS) -> str:
    """The page with every marked number as its file has it.

    Raises ValueError where a marker names no number: no file, no such key, or no digits before it.
    """
    return MARKED.sub(lambda found: renewed(found, results), page)


def renewed(found: re.Match, results: Path) -> str:
    """A match of MARKED with its number as the file has it; code as it is."""
    if found["source"] is None:
        return found[0]
    if found["digits"] is None:
        raise ValueError(f"no number stands before the marker {found[0]!r}")
    value = read_value(" ".join(found["source"].split()), results)
    sign = found["sign"] and ("+" if value >= 0 else "-")
    unsigned = abs(value) if found["sign"] else value
    decimals = len(found["decimals"] or "")
    _, marker, rest = found[0].partition("<!--")
    return f"{sign}{unsigned:,.{decimals}f}{marker}{rest}"


def read_value(source: str, results: Path) -> float:
    """The number that a marker names: [LIST FUNCTION] FILE KEY [/ DIVISOR | * FACTOR]."""
    try:
        parts = SOURCE.fullmatch(source)
        found = json.loads((results / parts["file"]).read_text(encoding="utf-8"))
        value = COMBINE[parts["combine"]](at_key(found, parts["key"].split("/")))
        factor = float(parts["factor"] or 1)
        return value / factor if parts["operator"] == "/" else value * factor
    except (OSError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"the marker {source!r} names no number: {error!r}") from error


def at_key(value: Any, steps: list[str]) -> Any:
    """What a JSON value has at the end of these steps."""
    if not steps:
        return value
    step, *rest = steps
    if step == "*":
        entries = value.values() if isinstance(value, dict) else value
        return [at_key(entry, rest) for entry in entries]
    if isinstance(value, dict):
        return at_key(value[step], rest)
    if "=" in step:
        wanted = dict(condition.split("=", 1) for condition in step.split(","))
        entry = next(entry for entry in value if all(str(entry.get(name)) == text for name, text in wanted.items()))
        return at_key(entry, rest)
    return at_key(value[int(step)], rest)
