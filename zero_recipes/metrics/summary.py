"""What each rank has measured, brought together: the part of metrics.json that needs all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from zero_recipes.metrics.probe import utilisation
from zero_recipes.metrics.schema import (
    Evaluation,
    Measurements,
    ModelStateBytes,
    Number,
    Part,
    PeakMemory,
    StepSeconds,
    Tokens,
    TokensPerSecond,
)


@dataclass(frozen=True)
class RankFigures:
    """One rank's share of the figures."""

    peak: PeakMemory
    states: ModelStateBytes
    losses: list[float] | None  # one per optimizer step of this process; None where they are not known
    tokens: Tokens  # over all its steps
    timed_tokens: Tokens  # over the timed ones
    timed_flops: float = 0.0  # the model's, over the timed steps; 0 where they are not counted


class History(Part):
    """What a checkpoint carries of the measurements, for the run that goes on from it; all of it may be missing."""

    summary: Measurements = Measurements()
    grad_norm_history: list[Number] = Field([])
    eval_history: list[Evaluation] = Field([])
    first_step: int | None = None  # of the loss history
    resumed_at: list[int] = Field([])


def summarise(
    ranks: Sequence[RankFigures], seconds: Sequence[float], warmup: int, peak_flops: float | None = None, **more: Any
) -> Measurements:
    """The figures of all ranks over at least one step. `seconds`: of each step; `warmup`: how many are not timed;
    `peak_flops`: FLOP/s of a card, None where it is not known; `more`: what rank 0 alone knows (fields of
    Measurements). Where none is timed, times and rates are null."""
    timed = seconds[warmup:]
    speed = _sum([rank.timed_tokens for rank in ranks])
    flops = sum(rank.timed_flops for rank in ranks)
    used = utilisation(flops, speed.non_padding, sum(timed), len(ranks), peak_flops) if timed else {}
    return Measurements(
        peak_memory_bytes=[rank.peak for rank in ranks],
        model_state_bytes=[rank.states for rank in ranks],
        tokens=_sum([rank.tokens for rank in ranks]),
        tokens_per_second=TokensPerSecond(**_rates(speed, sum(timed))) if timed else None,
        step_seconds=StepSeconds(
            median=statistics.median(timed) if timed else None,
            p90=sorted(timed)[min(len(timed) - 1, int(0.9 * len(timed)))] if timed else None,
            warmup_steps_excluded=warmup,
        ),
        **used,
        loss_history=_means([rank.losses for rank in ranks]),
        **more,
    )


def continued(earlier: Measurements, now: Measurements) -> Measurements:
    """The figures of a resumed run: losses and tokens of the whole run, everything else of the last process."""
    if earlier.tokens is None:
        return now
    losses = [*(earlier.loss_history or []), *now.loss_history]
    more = {"loss_history": losses, "tokens": _sum([earlier.tokens, now.tokens])}
    if now.skipped_steps is not None:
        more["skipped_steps"] = (earlier.skipped_steps or 0) + now.skipped_steps
    return now.model_copy(update=more)


def tokens_of(counted: torch.Tensor | None, labelled: bool = True) -> Tokens:
    """The first three of what StageMetricsCallback counts. `labelled`: whether anything says which carry the loss."""
    every, non_padding, supervised = [0, 0, 0] if counted is None else counted[:3].tolist()
    return Tokens(all=every, non_padding=non_padding, supervised=supervised if labelled else None)


def _means(losses: list[list[float] | None]) -> list[float] | None:
    if None in losses:
        return None
    return [sum(step) / len(losses) for step in zip(*losses, strict=True)]


def _rates(counts: Tokens, seconds: float) -> dict[str, float | None]:
    return {key: None if count is None else count / seconds for key, count in counts}


def _sum(counts: Sequence[Tokens]) -> Tokens:
    columns = {key: [getattr(count, key) for count in counts] for key in Tokens.model_fields}
    return Tokens(**{key: None if None in column else sum(column) for key, column in columns.items()})
