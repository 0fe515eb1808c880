"""The rows as tables: of the comparison, of single runs and of each sweep of values. texts.yaml lists the columns."""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import resources
from typing import Any, NamedTuple

import yaml

from zero_recipes.core import units
from zero_recipes.core.tables import Column, Row, markdown_columns
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.report import rows

LONGEST_REASON = 72  # characters
WRITTEN: dict[str, Callable[[Any], str]] = {
    "size": units.size,
    "size_above_zero": lambda value: units.size(value or None),
    "count": units.count,
    "percent": units.percent,
    "seconds": lambda value: "" if value is None else f"{units.significant(value)} s",
    "hundredths": lambda value: units.fixed(value, 2),
    "hundredths_above_zero": lambda value: units.fixed(value or None, 2),
    "loss": lambda value: units.fixed(value, 4),
}


@cache
def texts() -> dict[str, Any]:
    """texts.yaml."""
    return yaml.safe_load(resources.files(__package__).joinpath("texts.yaml").read_text(encoding="utf-8"))


class Table(NamedTuple):
    """`rows` (rows.table_rows) under columns that name a row, and columns about memory, and about speed and loss."""

    title: str
    named: list[Column]
    memory: list[Column]
    speed: list[Column]
    rows: Sequence[Row]

    @property
    def measured(self) -> list[Column]:
        return self.memory + self.speed

    @property
    def notes(self) -> list[str]:
        """What a reader needs to know about the columns that are shown."""
        shown = {column.header for column in self.measured}
        return [column["note"] for column in texts()["memory"] + texts()["speed"]
                if "note" in column and column["header"] in shown]  # fmt: skip

    @property
    def markdown(self) -> str:
        return markdown_columns(self.named, self.measured, self.rows)


def tables(runs: Sequence[MeasuredRun]) -> list[Table]:
    """Of the comparison, of single runs and of each sweep; empty ones are left out."""
    groups = {"Comparison": rows.comparison(runs), "Single runs": rows.single_runs(runs)}
    found = [runs_table(group, f"{title}: {rows.setting(group)}") for title, group in groups.items() if group]
    return [*found, *map(sweep_table, rows.sweeps(runs))]


def notes(runs: Sequence[MeasuredRun]) -> list[str]:
    """The notes of all tables."""
    return list(dict.fromkeys(note for table in tables(runs) for note in table.notes))


def runs_table(runs: Sequence[MeasuredRun], title: str = "") -> Table:
    """A row a run."""
    chosen = rows.table_rows(runs)
    named = [Column("Run", lambda row: row["label"]), Column("Status", lambda row: row["status"])]
    return Table(title, named, _columns("memory", chosen), _columns("speed", chosen), chosen)


def sweep_table(runs: Sequence[MeasuredRun]) -> Table:
    """The runs of one sweep: the values that were set, what was measured, and why what did not run did not."""
    chosen, keys = rows.table_rows(runs), list(runs[0].swept)
    named = [Column(name, partial(_swept_value, key)) for key, name in short_names(keys).items()]
    if len({row["strategy"] for row in chosen}) > 1:
        named.append(Column("Strategy", lambda row: row["strategy"]))
    measured = _columns("memory", chosen, texts()["swept"]) + _columns("speed", chosen, texts()["swept"])
    measured.append(Column("Status", lambda row: row["status"]))
    if any(row["reason"] for row in chosen):
        measured.append(Column("Reason", _reason))
    return Table(f"Sweep of {', '.join(keys)}: {rows.setting(runs)}", named, measured, [], chosen)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """{key: its last part, where no other key ends alike}."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def value_text(value: Any) -> str:
    """A value that a sweep set, as a cell shows it."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False)


def _columns(about: str, chosen: Sequence[Row], keys: Sequence[str] = ()) -> list[Column]:
    """The columns "memory" or "speed" (those of `keys`, if given) in which some row has a value.

    Resident memory takes the place of the allocated peak where there is no accelerator.
    """
    reference = next((row["label"] for row in chosen if row["relative_speed"] == 1), "baseline")
    hidden = {"resident_bytes"} if any(row["peak_allocated_bytes"] for row in chosen) else {"peak_allocated_bytes"}
    listed = [column for column in texts()[about] if column["key"] not in hidden]
    found = [
        Column(column["header"].replace("baseline", reference), partial(_cell, column["key"], WRITTEN[column["as"]]))
        for column in listed
        if not keys or column["key"] in keys
    ]
    return [column for column in found if any(map(column.cell, chosen))]


def _cell(key: str, written: Callable[[Any], str], row: Row) -> str:
    return written(row[key])


def _swept_value(key: str, row: Row) -> str:
    return value_text(row["swept"][key])


def _reason(row: Row) -> str:
    words = " ".join(part for part in (row["code"], row["reason"]) if part)
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 1].rstrip() + "…"
