"""The rows as a table: for the terminal (rich), for a README (markdown), for the page (lists of cells)."""

from collections.abc import Sequence

from rich.console import Console

from zero_recipes.core import units
from zero_recipes.core.tables import Column, Row, markdown_columns, print_columns

# First line of a header, and what it means.
NOTES = {
    "Model": "Model states: parameters, gradients and optimizer on the rank that holds most.",
    "Textbook": "Textbook: the ZeRO paper's formula for the model states.",
    "Planned": "Planned: what zero-recipes plan said before the run, model states and allocated peak.",
    "On": "On host, on disk: model states of that rank in the host's memory, in swap files on NVMe.",
    "Resident": "Resident: memory of the whole process, most of it imported libraries; no accelerator was measured.",
    "Tokens/s": "Tokens/s: without padding, over all ranks.",
    "MFU": "MFU: model FLOPs of the tokens without padding, as a share of the GPU's dense peak.",
    "Not": "Not padding, with loss: shares of all tokens that the steps computed.",
    "Comm.": "Comm.: bytes sent through collectives in one step; an all-reduce counts twice, others once.",
    "Between": "Between nodes: the part of it that crosses the network, for one machine.",
    "Paper": "Paper: the volume that the strategy's paper gives; ZeRO++'s is that between nodes.",
    "in Φ": "Φ: the bytes of the trainable parameters in the run's precision.",
    "Final": "Final loss: mean of the last five steps.",
}


def report_columns(rows: Sequence[Row]) -> tuple[list[Column], list[Column], list[Column]]:
    """Columns naming the row, about memory, and about speed and loss; columns nobody has a value for are left out.

    Committed rows of earlier versions have no "mfu" and no shares of tokens.
    """
    reference = next((row["label"] for row in rows if row["relative_speed"] == 1), "baseline")
    named = [
        Column("Run", lambda row: row["label"]),
        Column("Status", lambda row: row["status"]),
    ]
    memory = [
        Column("Model\nstates", lambda row: units.size(row["state_bytes"])),
        Column("Params", lambda row: units.size(row["params_bytes"])),
        Column("Grads", lambda row: units.size(row["grads_bytes"])),
        Column("Optimizer", lambda row: units.size(row["optimizer_bytes"])),
        Column("Textbook", lambda row: units.size(row["textbook_bytes"])),
        Column("Planned\nstates", lambda row: units.size(row["planned_state_bytes"])),
        Column("On\nhost", lambda row: units.size(row["host_bytes"] or None)),
        Column("On\ndisk", lambda row: units.size(row["disk_bytes"] or None)),
        _peak_column(rows),
        Column("Planned\npeak", lambda row: units.size(row["planned_peak_bytes"])),
    ]
    speed = [
        Column("Tokens/s", lambda row: units.count(row["tokens_per_second"])),
        Column(f"of {reference}", lambda row: units.percent(row["relative_speed"])),
        Column("MFU", lambda row: units.percent(row.get("mfu"))),
        Column("Not\npadding", lambda row: units.percent(row.get("non_padding_share"))),
        Column("With\nloss", lambda row: units.percent(row.get("supervised_share"))),
        Column("Step\nmedian", lambda row: _seconds(row["step_seconds_median"])),
        Column("Comm.\nper step", lambda row: units.size(row["communication_bytes"])),
        Column("in Φ", lambda row: units.fixed(row["communication_in_phi"], 2)),
        Column("Between\nnodes in Φ", lambda row: units.fixed(row["between_nodes_in_phi"] or None, 2)),
        Column("Paper\nin Φ", lambda row: units.fixed(row["paper_in_phi"], 2)),
        Column("Final\nloss", lambda row: units.fixed(row["final_loss"], 4)),
    ]
    return named, _filled(memory, rows), _filled(speed, rows)


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader needs to know about the columns that are shown."""
    _, memory, speed = report_columns(rows)
    shown = {column.header.split("\n")[0] for column in memory + speed}
    return [text for header, text in NOTES.items() if header in shown]


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print the rows; where the terminal is narrow, as several tables that each name the runs again."""
    named, memory, speed = report_columns(rows)
    print_columns(named, memory + speed, rows, console)


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows for a README, without the notes."""
    named, memory, speed = report_columns(rows)
    return markdown_columns(named, memory + speed, rows)


def _filled(chosen: list[Column], rows: Sequence[Row]) -> list[Column]:
    return [column for column in chosen if any(column.cell(row) for row in rows)]


def _has_accelerator(rows: Sequence[Row]) -> bool:
    return any(row["peak_allocated_bytes"] is not None for row in rows)


def _peak_column(rows: Sequence[Row]) -> Column:
    if _has_accelerator(rows):
        return Column("Peak\nallocated", lambda row: units.size(row["peak_allocated_bytes"]))
    return Column("Resident\n(mostly\nimports)", lambda row: units.size(row["resident_bytes"]))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{units.significant(value)} s"
