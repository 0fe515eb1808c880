"""The table of a sweep of values: what was set, what it cost, and why what did not run did not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zero_recipes.core.tables import Column, Row
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.report import rows, table

LONGEST_REASON = 72  # characters


def groups(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """The runs of each sweep: those whose values were set for the same keys."""
    by_keys: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in runs:
        if run.swept is not None:
            by_keys.setdefault(tuple(run.swept), []).append(run)
    return list(by_keys.values())


def keys_of(runs: Sequence[MeasuredRun]) -> list[str]:
    """The keys that a sweep set, in the order of its command line."""
    return list(runs[0].swept)


def title(runs: Sequence[MeasuredRun]) -> str:
    """What was set, and the setting that all runs share."""
    return f"Sweep of {', '.join(keys_of(runs))}: {rows.setting(runs)}"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """{key: its last part, where no other key ends alike}."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def value_text(value: Any) -> str:
    """A value as a cell shows it."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False)


def columns(swept: Sequence[Row]) -> tuple[list[Column], list[Column]]:
    """(the columns of the values, those of what was measured) for the rows of one sweep (rows.table_rows)."""
    names = short_names(list(swept[0]["swept"]))
    named = [Column(name, _cell_of(key)) for key, name in names.items()]
    if len({row["strategy"] for row in swept}) > 1:
        named.append(Column("Strategy", lambda row: row["strategy"]))
    _, memory, speed = table.report_columns(swept)
    known = {column.header: column for column in memory + speed}
    wanted = ("Model\nstates", "On\nhost", "On\ndisk", "Peak\nallocated", "Resident\n(mostly\nimports)",
              "Comm.\nper step", "Step\nmedian", "Tokens/s", "Final\nloss")  # fmt: skip
    measured = [known[header] for header in wanted if header in known]
    measured.append(Column("Status", lambda row: row["status"]))
    if any(row["reason"] for row in swept):
        measured.append(Column("Reason", _reason))
    return named, measured


def notes(swept: Sequence[Row]) -> list[str]:
    """What a reader needs to know about the columns that are shown."""
    shown = {column.header.split("\n")[0] for column in columns(swept)[1]}
    return [text for header, text in table.NOTES.items() if header in shown]


def _cell_of(key: str):
    return lambda row: value_text(row["swept"][key])


def _reason(row: Mapping[str, Any]) -> str:
    words = " ".join(part for part in (row["code"], row["reason"]) if part)
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 1].rstrip() + "…"
