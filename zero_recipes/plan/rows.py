"""Every requested strategy and number of GPUs as a row: its need, whether it fits, its speed, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.hardware import Gpu
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.advice import Change, Limits, limits_of, smallest_change
from zero_recipes.plan.cost import Speed, estimate
from zero_recipes.plan.fit import Fit, fit_of
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import PlanRequest, Strategies
from zero_recipes.plan.predict import Predict

Excluded = dict[int, dict[str, str]]


@dataclass(frozen=True)
class Row:
    """One strategy on one number of GPUs."""

    job: Job
    prediction: Prediction
    fit: Fit
    speed: Speed  # every sequence as long as it may be
    real: Speed | None = None  # of the rows, where their lengths are known
    change: Change | None = None  # only where it does not fit, and where there is one
    limits: Limits | None = None  # only where they are requested

    @property
    def expected(self) -> Speed:
        """The best that is known of the run's."""
        return self.real or self.speed

    @property
    def offloads(self) -> bool:
        return bool(self.speed.offloading[1])


def make_row(
    job: Job,
    gpu: Gpu,
    predict: Predict,
    strategies: Strategies,
    factor: float | None = None,
    with_change: bool = True,
    host: int | None = None,
    lengths: RowLengths | None = None,
    nvme: int | None = None,
) -> Row:
    """`factor`: measured over estimated seconds (cost.py). `with_change`: look for one where `job` does not fit.

    `host`, `nvme`: bytes of each machine's memory and NVMe, `lengths`: of the rows; None where they are not known.
    """
    prediction = predict(job)
    fit = fit_of(prediction, gpu.memory_bytes, host, nvme)
    change = None
    if with_change and fit.status != "fits":
        change = smallest_change(job, gpu.memory_bytes, predict, strategies, host, nvme)
    real = None if lengths is None else estimate(job, prediction, gpu, factor, lengths)
    return Row(job, prediction, fit, estimate(job, prediction, gpu, factor), real, change)


def rows_of(request: PlanRequest, predict: Predict, factor: float | None) -> tuple[list[Row], dict[int, str], Excluded]:
    """(a row for each strategy and count, {count: why the recipe cannot run on so many}, {count: {strategy: why it is
    not planned there}}). Raises Refusal for none.

    Changes are looked for where one count is requested, or nothing fits, on the most GPUs.
    """

    def made(job: Job, with_change: bool) -> Row:
        known = (request.strategies, factor, with_change, request.host, request.lengths, request.nvme)
        return make_row(job, request.gpu, predict, *known)

    rows, refused, excluded, last = [], {}, {}, None
    for count in request.counts:
        try:
            jobs = {strategy: request.job(strategy, count) for strategy in request.strategies}
        except Refusal as refusal:
            refused[count], last = refusal.what, refusal
            continue
        why = {name: request.excluded(name, job) for name, job in jobs.items()}
        excluded[count] = {name: reason for name, reason in why.items() if reason}
        able = [job for name, job in jobs.items() if not why[name]]
        rows += [made(job, with_change=len(request.counts) == 1) for job in able]
    if not rows:
        raise last or _none_able(excluded)
    if len(request.counts) > 1 and not any(row.fit.status == "fits" for row in rows):
        largest = max(row.job.world_size for row in rows)
        rows = [made(row.job, with_change=True) if row.job.world_size == largest else row for row in rows]
    return rows, refused, excluded


def _none_able(excluded: Excluded) -> Refusal:
    count, reasons = next(iter(excluded.items()))
    return refusal(
        "ZR842",
        count=count,
        what="" if count == 1 else "s",
        items="; ".join((f"{name}: {reason}" for name, reason in reasons.items())),
    )


def with_limits(row: Row, gpu: Gpu, predict: Predict, guess: Predict) -> Row:
    return replace(row, limits=limits_of(row.job, gpu.memory_bytes, predict, guess))


def fewest_gpus(rows: Sequence[Row], with_offload: bool) -> int | None:
    """The fewest GPUs on which a strategy fits."""
    fitting = [row for row in rows if row.fit.status == "fits" and (with_offload or not row.offloads)]
    return min((row.job.world_size for row in fitting), default=None)


def smallest_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the fewest GPUs on which a strategy fits; of the most where none does."""
    count = fewest_gpus(rows, with_offload=True) or max(row.job.world_size for row in rows)
    return [row for row in rows if row.job.world_size == count]
