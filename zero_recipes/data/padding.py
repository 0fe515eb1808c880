"""What padding costs a run, from the counts of its rows."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.core.errors import Finding
from zero_recipes.data.audit import Audit

MUCH = 0.2  # of the tokens computed
ROWS = 1000  # fewer are soon done


def padding_findings(found: Audit, training_args) -> Iterator[Finding]:
    """At most one finding: much of what a step computes is padding, and packing or grouping would not compute it."""
    if training_args.train_sampling_strategy == "group_by_length" or found.rows < ROWS:
        return
    share = found.padding_share
    if share >= MUCH:
        yield Finding(
            "ZR563",
            f"{share:.0%} of the tokens that a step computes are padding",
            "Each row is padded to the longest of its micro batch; without padding the same rows are "
            f"{1 / (1 - share):.1f} times fewer tokens (counted from the rows, not measured).",
            "Set packing: true with per_device_train_batch_size: 1 (docs/fast.md); where check refuses packing for the "
            "model, train_sampling_strategy: group_by_length.",
            level="warning",
        )
