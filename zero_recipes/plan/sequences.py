"""What a run computes for one sequence of a micro batch, and how much of it is of tokens that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_recipes.data.prepare import RowLengths
from zero_recipes.plan.formulas.shape import shape_of
from zero_recipes.plan.job import Job
from zero_recipes.theory.flops import ModelFlops, squares

BY_LENGTH = ("group_by_length", "batch_rebalance")  # train_sampling_strategy: rows of a micro batch are alike


@dataclass(frozen=True)
class OneSequence:
    """The mean over a run. `tokens`, `flops` (theory/flops.py): without padding; `places`: tokens with padding;
    `computed`: FLOPs with padding, as a share of those of a sequence that is as long as it may be."""

    tokens: float
    places: float
    flops: float
    computed: float


def sequence_of(job: Job, longest: int, rows: RowLengths | None) -> OneSequence:
    """`longest`: tokens that a sequence may have; `rows`: None where all have as many.

    Raises Refusal where the model's class cannot be built.
    """
    model = shape_of(job.config, job.settings).flops
    full = model.of_rows([longest])
    if rows is None:
        return OneSequence(longest, longest, full, 1.0)
    tokens, flops = sum(rows.lengths) / rows.sequences, model.of_rows(rows.lengths) / rows.sequences
    if not pads(job):
        return OneSequence(tokens, longest if job.settings.packing else tokens, flops, flops / full)
    places, padded = _padded(model, rows.lengths, padded_together(job))
    return OneSequence(tokens, places, flops, padded / full)


def pads(job: Job) -> bool:
    """Whether a micro batch is as long as its longest row."""
    settings = job.settings
    alike = str(settings.train_sampling_strategy) in BY_LENGTH
    return not (settings.packing or settings.padding_free or alike)


def padded_together(job: Job) -> int:
    """Of how many rows the longest decides: those of a micro batch; those of all ranks where each waits for the others
    in every pass (stages 2 and 3 and FSDP2 send something in each; all do without accumulation)."""
    each_pass = job.zero_stage in (2, 3) or job.is_fsdp or job.settings.gradient_accumulation_steps == 1
    replicas = job.world_size // job.sequence_parallel
    return job.settings.per_device_train_batch_size * (replicas if each_pass else 1)


def _padded(model: ModelFlops, lengths: Sequence[float], together: int) -> tuple[float, float]:
    """(tokens, FLOPs) of one row that is padded to the longest of `together` rows drawn at random, the mean."""
    ordered = sorted(lengths)
    count = len(ordered)
    chances = [((i + 1) / count) ** together - (i / count) ** together for i in range(count)]  # of being the longest
    places = sum(chance * length for chance, length in zip(chances, ordered, strict=True))
    squared = [
        sum(chance * squares(length, window) for chance, length in zip(chances, ordered, strict=True))
        for window in model.attention
    ]
    return places, model.of_step(places, squared)
