"""The report's tables: rows of read.py under the columns of columns.py."""

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from zero_recipes.core.tables import Column, Row
from zero_recipes.tools.report.columns import MEMORY, SPEED, SWEPT, Measured
from zero_recipes.tools.report.read import Runs, comparison, setting, single_runs, sweeps, table_rows, value_text

LONGEST_REASON = 72  # characters


class Table(NamedTuple):
    """Rows under columns that name them, and those about memory, and speed and loss."""

    title: str
    named: list[Column]
    memory: list[Column]
    speed: list[Column]
    rows: Sequence[Row]

    @property
    def measured(self) -> list[Column]:
        """All columns with numbers."""
        return self.memory + self.speed


def tables_of(runs: Runs) -> list[Table]:
    """Make all tables of the report: of strategies, of single runs, and of each sweep. Empty ones are left out."""
    found = []
    groups = {"Comparison": comparison(runs), "Single runs": single_runs(runs)}
    for title, group in groups.items():
        if group:
            found.append(runs_table(group, f"{title}: {setting(group)}"))
    for group in sweeps(runs):
        found.append(sweep_table(group))
    return found


def notes(runs: Runs) -> list[str]:
    """Explain the columns that are shown."""
    shown = set()
    for table in tables_of(runs):
        shown.update(column.header for column in table.measured)
    return [column.note for column in (*MEMORY, *SPEED) if column.note and column.header in shown]


def runs_table(runs: Runs, title: str = "") -> Table:
    """Make a table with a row for each run."""
    rows = table_rows(runs)
    named = [Column("Run", itemgetter("label")), Column("Status", itemgetter("status"))]
    return Table(title, named, _columns(MEMORY, rows), _columns(SPEED, rows), rows)


def sweep_table(runs: Runs) -> Table:
    """Make a table of one sweep: values, measurements, and why a run failed."""
    rows = table_rows(runs)
    keys = list(runs[0].swept)
    named = [Column(key, partial(_swept_cell, key)) for key in keys]
    if len({row["strategy"] for row in rows}) > 1:
        named.append(Column("Strategy", itemgetter("strategy")))
    shown = [column for column in (*MEMORY, *SPEED) if column.key in SWEPT]
    measured = _columns(shown, rows)
    measured.append(Column("Status", itemgetter("status")))
    if any(row["reason"] for row in rows):
        measured.append(Column("Reason", _reason_cell))
    return Table(f"Sweep of {', '.join(keys)}: {setting(runs)}", named, measured, [], rows)


def _swept_cell(key: str, row: Row) -> str:
    value = row["swept"][key]
    return f"{value:,}" if type(value) is int else value_text(value)


def _reason_cell(row: Row) -> str:
    reason = f"{row['code'] or ''} {row['reason'] or ''}"
    return textwrap.shorten(reason, LONGEST_REASON, placeholder="…")


def _columns(measured: Sequence[Measured], rows: Sequence[Row]) -> list[Column]:
    """The columns in which some row has a value.

    Without an accelerator, resident memory replaces the allocated peak.
    """
    has_accelerator = any(row["peak_allocated_bytes"] for row in rows)
    hidden = "resident_bytes" if has_accelerator else "peak_allocated_bytes"
    reference = next((row["label"] for row in rows if row["relative_speed"] == 1), "baseline")
    found = []
    for one in measured:
        header = one.header.replace("baseline", reference)
        column = Column(header, partial(_cell, one.key, one.written))
        if one.key != hidden and any(map(column.cell, rows)):
            found.append(column)
    return found


def _cell(key: str, written: Callable[[Any], str], row: Row) -> str:
    return written(row[key])
