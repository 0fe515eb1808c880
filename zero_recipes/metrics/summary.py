"""What each rank has measured, brought together: the part of metrics.json that needs all ranks."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from zero_recipes.metrics import schema
from zero_recipes.metrics.probe import utilisation


@dataclass(frozen=True)
class RankFigures:
    """One rank's share of the figures."""

    peak: schema.PeakMemory
    states: schema.ModelStateBytes
    losses: list[float] | None  # one per optimizer step of this process; None where they are not known
    tokens: list[int | None]  # over all its steps: all, non-padding, supervised (None where they are not known)
    timed_tokens: list[int | None]  # over the timed ones
    timed_flops: float = 0.0  # the model's, over the timed steps; 0 where they are not counted


class History(schema.Part):
    """What a checkpoint carries of the measurements, for the run that goes on from it; all of it may be missing."""

    summary: schema.Measurements = schema.Measurements()
    grad_norm_history: list[schema.Number] = Field([])
    eval_history: list[schema.Evaluation] = Field([])
    first_step: int | None = None  # of the loss history
    resumed_at: list[int] = Field([])


def summarise(
    ranks: Sequence[RankFigures], seconds: Sequence[float], warmup: int, peak_flops: float | None = None, **more: Any
) -> schema.Measurements:
    """The figures of all ranks over at least one step. `seconds`: of each step; `warmup`: how many are not timed;
    `peak_flops`: FLOP/s of a card, None where it is not known; `more`: what rank 0 alone knows (fields of
    Measurements). Where none is timed, times and rates are null."""
    timed = seconds[warmup:]
    speed = _sums([rank.timed_tokens for rank in ranks])
    flops = sum(rank.timed_flops for rank in ranks)
    used = utilisation(flops, speed.non_padding, sum(timed), len(ranks), peak_flops) if timed else {}
    rates = {kind: None if count is None or not timed else count / sum(timed) for kind, count in speed}
    losses = [rank.losses for rank in ranks]
    return schema.Measurements(
        peak_memory_bytes=[rank.peak for rank in ranks],
        model_state_bytes=[rank.states for rank in ranks],
        tokens=_sums([rank.tokens for rank in ranks]),
        tokens_per_second=schema.Tokens(**rates) if timed else None,
        step_seconds=schema.StepSeconds(
            median=statistics.median(timed) if timed else None,
            p90=sorted(timed)[min(len(timed) - 1, int(0.9 * len(timed)))] if timed else None,
            warmup_steps_excluded=warmup,
        ),
        **used,
        loss_history=None if None in losses else [sum(step) / len(ranks) for step in zip(*losses, strict=True)],
        **more,
    )


def continued(earlier: schema.Measurements, now: schema.Measurements) -> schema.Measurements:
    """The figures of a resumed run: losses and tokens of the whole run, everything else of the last process."""
    if earlier.tokens is None:
        return now
    losses = [*(earlier.loss_history or []), *now.loss_history]
    tokens = _sums([list(dict(each.tokens).values()) for each in (earlier, now)])
    more = {"loss_history": losses, "tokens": tokens}
    if now.skipped_steps is not None:
        more["skipped_steps"] = (earlier.skipped_steps or 0) + now.skipped_steps
    return now.model_copy(update=more)


def _sums(counts: Sequence[Sequence[int | None]]) -> schema.Tokens:
    """Of each kind; None where one of them is not known."""
    sums = [None if None in column else sum(column) for column in zip(*counts, strict=True)]
    return schema.Tokens(**dict(zip(schema.Tokens.model_fields, sums, strict=True)))
