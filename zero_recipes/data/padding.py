"""What padding costs a run, from the counts of its rows."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.core.findings import Finding, finding
from zero_recipes.data.audit import Audit

MUCH = 0.2  # of the tokens computed
ROWS = 1000  # fewer are soon done


def padding_findings(found: Audit, training_args) -> Iterator[Finding]:
    """At most one finding: much of what a step computes is padding, and packing or grouping would not compute it."""
    if training_args.train_sampling_strategy == "group_by_length" or found.rows < ROWS:
        return
    share = found.padding_share
    if share >= MUCH:
        yield finding("ZR563", share=share, share_2=1 / (1 - share))
