"""What to run: every strategy as a row, the rules of the choice in their order, or the change that costs least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_recipes.config.ds_config import OFFLOADS
from zero_recipes.core.host import Gpu
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.changes import COST_ORDER, Change, Limits, smallest_change
from zero_recipes.plan.cost import Speed, estimate
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import PlanRequest
from zero_recipes.plan.predict import Fit, Predict, fit_of

ROOM = 0.25  # of the GPU's memory, to be left: for larger batches and evaluations, and for what the plan does not know


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

    @property
    def has_room(self) -> bool:
        return self.fit.margin >= ROOM * self.fit.capacity


def make_row(
    request: PlanRequest, job: Job, predict: Predict, factor: float | None = None, with_change: bool = True
) -> Row:
    """`factor`: measured over estimated seconds (cost.py). `with_change`: look for one where `job` does not fit."""
    prediction, gpu = predict(job), request.gpu
    fit = fit_of(prediction, gpu.memory_bytes, request.host, request.nvme)
    change = None
    if with_change and fit.status != "fits":
        change = smallest_change(job, gpu.memory_bytes, predict, request.strategies, request.host, request.nvme)
    real = request.lengths and estimate(job, prediction, gpu, factor, request.lengths)
    return Row(job, prediction, fit, estimate(job, prediction, gpu, factor), real, change)


def rows_of(request: PlanRequest, jobs: Sequence[Job], predict: Predict, factor: float | None) -> list[Row]:
    """A row for each job. Changes are looked for where one count is requested, or nothing fits, on the most GPUs."""
    is_one = len(request.counts) == 1
    rows = [make_row(request, job, predict, factor, with_change=is_one) for job in jobs]
    if is_one or any(row.fit.status == "fits" for row in rows):
        return rows
    most = max(row.job.world_size for row in rows)
    return [make_row(request, row.job, predict, factor) if row.job.world_size == most else row for row in rows]


def fewest_gpus(rows: Sequence[Row], with_offload: bool) -> int | None:
    """The fewest GPUs on which a strategy fits."""
    fitting = [row for row in rows if row.fit.status == "fits" and (with_offload or not row.offloads)]
    return min((row.job.world_size for row in fitting), default=None)


def smallest_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the fewest GPUs on which a strategy fits; of the most where none does."""
    count = fewest_gpus(rows, with_offload=True) or max(row.job.world_size for row in rows)
    return [row for row in rows if row.job.world_size == count]


def fastest_of(rows: Sequence[Row]) -> list[Row]:
    """Those that are as fast as the fastest one, within the error of its estimate."""
    fastest = min(rows, key=lambda row: row.expected.middle, default=None)
    return [row for row in rows if row.expected.middle <= fastest.expected.step_seconds[1]]


def _without_plus_plus(rows: Sequence[Row]) -> list[Row]:
    """All of them where ZeRO++ is all there is: only a comparison tells whether it is worth its rounding."""
    return [row for row in rows if kind(row.job) not in PLUS_PLUS] or list(rows)


def _leaves_room(row: Row, others: Sequence[Row]) -> bool:
    """A quarter of each GPU is left, and none is faster."""
    return row in fastest_of(_without_plus_plus(others)) and row.has_room


def _is_faster(row: Row, others: Sequence[Row]) -> bool:
    """Faster than all without ZeRO++, beyond the error of the estimates: on several nodes."""
    exact = _without_plus_plus(others)
    parts = [other for other in others if other not in exact]
    slowest = row.expected.step_seconds[1]
    return row in fastest_of(parts) and all(slowest < other.expected.middle for other in exact)


PLUS_PLUS = ("zero3_hpz", "zero3_plus_plus", "zero3_qwz", "zero3_qgz")
# {strategy: its rule, which takes a row of it and all rows of its place that fit}, for each place of the model states:
# on the GPUs, in the memory of each node, on NVMe. Places and their rules are tried in turn; where a strategy fits in a
# place and no rule holds, the one of the fastest that leaves most of each GPU is chosen.
# Lower stages communicate less. Stage 2 goes before stage 1, which holds whole gradients for longer and is no faster;
# where accumulation makes stage 2 slower, it is not among the fastest. ZeRO++ comes once a stage below 3 is out of the
# question; hpZ first, which changes no number. FSDP2 shares out as much as stage 3.
PLACES = (
    dict.fromkeys(("ddp", "zero0", "zero2", "zero1"), _leaves_room)
    | dict.fromkeys(PLUS_PLUS, _is_faster)
    | dict.fromkeys(("zero3", "fsdp2"), _leaves_room),
    dict.fromkeys(("zero2_offload", "zero3_offload"), _leaves_room),
    dict.fromkeys(("zero3_offload_infinity", "zero3_infinity"), _leaves_room),
)
ORDER = tuple(strategy for place in PLACES for strategy in place)


@dataclass(frozen=True)
class Recommendation:
    """What to run, and the rows that speak for it. Neither `chosen` nor `change` where nothing was found that fits."""

    rows: Sequence[Row]
    gpu: Gpu
    chosen: Row | None = None  # fits as the recipe is
    as_fast: Sequence[Row] = ()  # as fast as the fastest, within the estimate's own error; `chosen` is one of them
    change: Change | None = None  # where no row fits: the one that costs least
    other_arithmetic: Sequence[Row] = ()  # these fit too, and train otherwise: states in 16 bits, torch_autocast

    @property
    def fitting(self) -> list[Row]:
        return [row for row in self.rows if row.fit.status == "fits" and row not in self.other_arithmetic]

    @property
    def job(self) -> Job | None:
        found = self.chosen or self.change
        return found and found.job


def recommend(rows: Sequence[Row], gpu: Gpu) -> Recommendation:
    """What the first place that holds a strategy says by its rules; else the change of all rows that costs least.

    As fast: on average no slower than the slow end of the fastest row's range, for the estimate is no better than its
    range. Strategies with another arithmetic are never chosen beside others. `rows`: of one machine.
    """
    exact = [row for row in rows if not changes_arithmetic(row.job)] or list(rows)
    fitting = [row for row in exact if row.fit.status == "fits"]
    otherwise = [row for row in rows if row not in exact and row.fit.status == "fits"]
    if not fitting:
        changes = [row.change for row in exact if row.change]
        least = min(changes, key=lambda change: _cost_of(change, gpu), default=None)
        return Recommendation(rows, gpu, change=least, other_arithmetic=otherwise)
    place, found = next((place, found) for place in PLACES if (found := _in(place, fitting)))
    by_rule = (row for row in found if place[kind(row.job)](row, found))
    chosen = next(by_rule, None) or max(fastest_of(_without_plus_plus(found)), key=lambda row: row.fit.margin)
    alike = [row for row in found if (kind(row.job) in PLUS_PLUS) == (kind(chosen.job) in PLUS_PLUS)]
    return Recommendation(rows, gpu, chosen, fastest_of(alike), other_arithmetic=otherwise)


def kind(job: Job) -> str:
    """The strategy of ORDER that `job` is one of, whatever its name and its other settings."""
    zero = job.zero
    if job.ds_config is None:
        return "fsdp2" if job.is_fsdp else "ddp"
    if job.on_nvme:
        return "zero3_offload_infinity" if "cpu" in map(zero.offload_device, OFFLOADS) else "zero3_infinity"
    if zero.offloads:
        return "zero3_offload" if job.zero_stage == 3 else "zero2_offload"
    parts = {"hpz": zero.hpz_partition_size != 1, "qwz": zero.quantizes_weights, "qgz": zero.quantizes_gradients}
    used = [name for name, is_used in parts.items() if is_used]
    if used:
        return f"zero3_{used[0]}" if len(used) == 1 else "zero3_plus_plus"
    return f"zero{job.zero_stage}"


def changes_arithmetic(job: Job) -> bool:
    """Whether it trains with other numbers than mixed precision does: optimizer states in 16 bits, or torch_autocast,
    which keeps fp32 weights. (ZeRO++'s quantised collectives round too; they have rules of their own.)"""
    return job.zero.bf16_masters or job.zero.bf16_states or job.zero.autocast is not None


def _in(place: Mapping[str, object], rows: Sequence[Row]) -> list[Row]:
    """Those of the place, in the order of its rules."""
    found = [row for row in rows if kind(row.job) in place]
    return sorted(found, key=lambda row: (ORDER.index(kind(row.job)), -row.fit.margin))


def _cost_of(change: Change, gpu: Gpu) -> tuple[int, float]:
    return COST_ORDER.index(change.costliest), estimate(change.job, change.prediction, gpu).middle
