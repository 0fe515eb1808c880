"""Figures of benchmarks/throughput.py, and their table for the terminal and docs/throughput.md: one row a strategy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from zero_recipes.core import tables

NOT_TIMED = 2  # steps: buffers are made, and the recipe's probe looks into the second one
Row = dict[str, Any]  # of throughput.json: a strategy of a workload


def together(ranks: list[Row], accumulation: int) -> Row:
    """What both ranks have seen of one training, by optimizer step: real and supervised tokens, elements of the
    batches, seconds (of the slower rank: a step ends where both have ended it)."""
    each = range(0, len(ranks[0]["tokens"]), accumulation)
    by_step = {
        key: [sum(sum(rank[key][first : first + accumulation]) for rank in ranks) for first in each]
        for key in ("tokens", "elements", "supervised")
    }
    seconds = [max(pair) for pair in zip(*(rank["step_seconds"] for rank in ranks), strict=True)]
    lengths = sorted(length for rank in ranks for length in rank["row_lengths"])
    return by_step | {"seconds": seconds, "row_lengths": lengths, "held_out_loss": ranks[0]["held_out_loss"]}


def tokens_per_second(program: Row) -> float:
    """Real tokens of the timed steps by their seconds."""
    return sum(program["tokens"][NOT_TIMED:]) / sum(program["seconds"][NOT_TIMED:])


def ratio_text(ratio: Row) -> str:
    """ "2.41 (2.35 to 2.50)": median, smallest and largest of the rounds."""
    return f"{ratio['median']:.2f} ({min(ratio['by_round']):.2f} to {max(ratio['by_round']):.2f})"


def worst_gap(found: Row) -> float:
    """The largest relative difference of any program's held-out loss from the recipe's, over all rounds."""
    losses = {name: program["held_out_loss"] for name, program in found["programs"].items()}
    return max(
        abs(one / mine - 1) for each in losses.values() for one, mine in zip(each, losses["recipe"], strict=True)
    )


def _speed(name: str) -> Callable[[tuple[str, Row]], str]:
    return lambda row: f"{statistics.median(row[1]['programs'][name]['tokens_per_second']):,.0f}"


NAMED = [tables.Column("strategy", lambda row: row[0])]
COLUMNS = [
    tables.Column("trl sft\ntokens/s", _speed("trl")),
    tables.Column("recipe\ntokens/s", _speed("recipe")),
    tables.Column("bare loop\ntokens/s", _speed("engine")),
    tables.Column("PyTorch\ntokens/s", _speed("plain")),
    tables.Column("recipe /\ntrl sft", lambda row: ratio_text(row[1]["ratios"]["recipe/trl"])),
    tables.Column("recipe /\nbare loop", lambda row: ratio_text(row[1]["ratios"]["recipe/engine"])),
    tables.Column("bare loop /\nPyTorch", lambda row: ratio_text(row[1]["ratios"]["engine/plain"])),
    tables.Column("over the bare\nloop, ms a step", lambda row: f"{row[1]['overhead_ms']:.1f}"),
    tables.Column("losses\napart", lambda row: f"{worst_gap(row[1]):.2%}"),
]
