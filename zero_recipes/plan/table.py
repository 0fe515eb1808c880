"""The plan as tables: one row a strategy, memory first, then what lies beside the GPU, time and money."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from zero_recipes.core import units
from zero_recipes.core.tables import Column, markdown_columns, print_columns
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.prediction import CheckpointBytes, HostBytes, ReservedRange
from zero_recipes.plan.cost import Cost, cost
from zero_recipes.plan.rows import Row
from zero_recipes.theory.zero_paper import paper_volume

HEADERS = {
    "params": "Params",
    "grads": "Grads",
    "optimizer": "Optimizer",
    "activations": "Activa-\ntions",
    "buckets": "Buckets,\ngathered",
    "loss_head": "Loss\nhead",
    "other": "Other",
}


def plan_columns(
    rows: Sequence[Row], price: float | None, lengths: RowLengths | None
) -> tuple[list[Column], list[Column]]:
    """(those naming the row, the others). `lengths`: of the rows; None where they are not known."""
    mixed = len({row.prediction.source for row in rows}) > 1
    named = [Column("Strategy", lambda row: _name(row, mixed)), Column("Status", status)]
    if len({row.job.world_size for row in rows}) > 1:
        named.insert(1, Column("GPUs", lambda row: str(row.job.world_size)))
    memory = [
        Column("Margin", lambda row: _signed(row.fit.margin)),
        Column("Peak", lambda row: units.size(row.prediction.allocated_peak_bytes)),
        Column("in", lambda row: row.prediction.peak_phase),
        *(Column(header, lambda row, part=part: _part(row, part)) for part, header in HEADERS.items()),
        Column("Reserved", lambda row: _reserved(row.prediction.reserved_bytes)),
    ]
    beside = [
        Column("Host", lambda row: _host(row.prediction.host_bytes)),
        Column("NVMe a node\n/ in all", _nvme),
        Column("Disk", lambda row: _disk(row.prediction.checkpoint_bytes)),
        Column("Comm.\nper step", lambda row: units.size(_moved(row)) if _moved(row) else ""),
    ]
    speed = [
        Column("Step", lambda row: f"{_between(row.speed.step_seconds)} s"),
        Column("Tokens/s", lambda row: _between(row.speed.tokens_per_second, units.count)),
    ]
    if any(row.real for row in rows):
        speed += [
            Column("Step of\nthe rows", lambda row: f"{_between(row.real.step_seconds)} s"),
            Column("Real\ntokens/s", lambda row: _between(row.real.tokens_per_second, units.count)),
        ]
    speed.append(Column("MFU", lambda row: _between(row.expected.mfu, units.percent)))
    if any(_cost(row, 1.0, lengths).hours for row in rows):
        speed.append(Column("Run\nin hours", lambda row: _between(_cost(row, 1.0, lengths).hours)))
    if price is not None:
        speed.append(Column("Cost of\n1M tokens", lambda row: _between(_cost(row, price).per_million_tokens)))
        if lengths is not None:
            real = Column("1M real\ntokens", lambda row: _between(_cost(row, price, lengths).per_million_tokens))
            speed.append(real)
        if any(_cost(row, price, lengths).run for row in rows):
            speed.append(Column("Cost of\nthe run", lambda row: _between(_cost(row, price, lengths).run)))
    shown = [column for column in memory if any(column.cell(row) for row in rows)]
    swaps = any(row.prediction.nvme_bytes for row in rows)
    return named, [*shown, *(column for column in beside if swaps or column.cell is not _nvme), *speed]


def status(row: Row) -> str:
    if row.fit.host_lacks or row.fit.nvme_lacks:
        return "no (host)" if row.fit.host_lacks else "no (NVMe)"
    return row.fit.status


def print_rows(rows: Sequence[Row], price: float | None, lengths: RowLengths | None, console: Console) -> None:
    named, others = plan_columns(rows, price, lengths)
    print_columns(named, others, rows, console)


def markdown(rows: Sequence[Row], price: float | None, lengths: RowLengths | None) -> str:
    """The same for a page."""
    return markdown_columns(*plan_columns(rows, price, lengths), rows)


def _between(values: tuple[float, float] | None, written=units.significant) -> str:
    """A range: 0.43 - 0.64; nothing where it is not known."""
    return "" if values is None else f"{written(values[0])} - {written(values[1])}"


def _name(row: Row, mixed: bool) -> str:
    return f"{row.job.strategy} *" if mixed and row.prediction.source == "formulas" else row.job.strategy


def _cost(row: Row, price: float, lengths: RowLengths | None = None) -> Cost:
    """Of the rows where their lengths are given, else of sequences as long as they may be."""
    return cost(row.job, row.speed if lengths is None else row.real, price, lengths)


def _moved(row: Row) -> int:
    return paper_volume(row.prediction.communication_bytes_per_step)


def _part(row: Row, part: str) -> str:
    return units.size(row.prediction.at_peak[part] or None)


def _signed(margin: int) -> str:
    return units.size(margin) if margin < 0 else f"+{units.size(margin)}"


def _reserved(expected: ReservedRange) -> str:
    return f"{units.size(expected.low)} - {units.size(expected.high)}"


def _disk(checkpoint: CheckpointBytes) -> str:
    return _sizes(checkpoint.weights, checkpoint.resumable)


def _host(held: HostBytes) -> str:
    return _sizes(held.load, held.training, held.resume or 0)


def _nvme(row: Row) -> str:
    """Swap files of one node and of all."""
    nodes = row.job.world_size // row.job.gpus_per_node
    each = row.prediction.nvme_bytes
    return f"{units.size(each)} / {units.size(nodes * each)}" if each else "-"


def _sizes(*sizes: int) -> str:
    return " / ".join(units.size(held) if held else "0" for held in sizes)
