"""What max_length does to the rows, and which one would cut none of them."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.core.findings import Finding, finding
from zero_recipes.data.audit import SLIPS, Audit
from zero_recipes.data.source import Source

MULTIPLE = 64  # of tokens: what tiles of matrix products on GPUs divide
PARTING = ("bfd_split", "wrapped")  # packing strategies that go on with a long row in the next pack: nothing is lost


def holding(tokens: int) -> int:
    """The least max_length of the usual ones that holds rows of so many tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def max_length_findings(found: Audit, training_args, source: Source) -> Iterator[Finding]:
    """At most one finding: more rows are cut than could be slips. Where most are dropped, the audit says it."""
    parted = training_args.packing and training_args.packing_strategy in PARTING
    if found.truncated <= max(1, SLIPS * found.rows) or found.dropped > found.rows / 2 or parted:
        return
    most = holding(found.most)
    fewer = f"; {most:,} holds 99 % of them" if training_args.max_length < most < holding(found.longest) else ""
    yield finding(
        "ZR553",
        max_length=training_args.max_length,
        truncated=found.truncated,
        rows=found.rows,
        split=source.split,
        truncated_2=found.truncated / found.rows,
        holding=holding(found.longest),
        longest=found.longest,
        fewer=fewer,
    )
