"""What to run: every strategy as a row, the rules of the choice in their order, or the change that costs least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zero_recipes.config.ds_config import OFFLOADS
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.hardware import Gpu
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.changes import COST_ORDER, Change, Limits, limits_of, smallest_change
from zero_recipes.plan.cost import Speed, estimate
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import PlanRequest
from zero_recipes.plan.predict import Fit, Predict, fit_of

ROOM = 0.25  # of the GPU's memory, to be left: for larger batches and evaluations, and for what the plan does not know
Excluded = dict[int, dict[str, str]]  # {number of GPUs: {strategy: why it is not planned}}


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


def rows_of(request: PlanRequest, predict: Predict, factor: float | None) -> tuple[list[Row], dict[int, str], Excluded]:
    """(a row for each strategy and count, {count: why the recipe cannot run on so many}, Excluded).

    Changes are looked for where one count is requested, or nothing fits, on the most GPUs. Raises Refusal for no row.
    """
    rows, refused, excluded, last = [], {}, {}, None
    for count in request.counts:
        try:
            jobs = {strategy: request.job(strategy, count) for strategy in request.strategies}
        except Refusal as error:
            refused[count], last = error.what, error
            continue
        why = {name: request.excluded(name, job) for name, job in jobs.items()}
        excluded[count] = {name: reason for name, reason in why.items() if reason}
        able = [job for name, job in jobs.items() if not why[name]]
        rows += [make_row(request, job, predict, factor, len(request.counts) == 1) for job in able]
    if not rows and last:
        raise last
    if not rows:
        count, reasons = next(iter(excluded.items()))
        raise refusal("ZR842", count=count, reasons="; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if len(request.counts) > 1 and not any(row.fit.status == "fits" for row in rows):
        most = max(row.job.world_size for row in rows)
        rows = [make_row(request, row.job, predict, factor) if row.job.world_size == most else row for row in rows]
    return rows, refused, excluded


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


@dataclass(frozen=True)
class Rule:
    """One condition on one strategy, which chooses it. `holds` takes all rows of its place that fit, it included."""

    strategy: str
    holds: Callable[[Row, Sequence[Row]], bool]


@dataclass(frozen=True)
class Place:
    """Where the model states are. Its rules are tried in turn if a strategy fits there; where none holds, the strategy
    that leaves most of each GPU is chosen."""

    where: str
    rules: tuple[Rule, ...]


def _leaves_room(row: Row, others: Sequence[Row]) -> bool:
    """A quarter of each GPU is left, and none is faster."""
    return row in fastest_of(_without_plus_plus(others)) and row.has_room


def _is_faster(row: Row, others: Sequence[Row]) -> bool:
    """Faster than all without ZeRO++, beyond the error of the estimates: on several nodes."""
    exact = _without_plus_plus(others)
    parts = [other for other in others if other not in exact]
    slowest = row.expected.step_seconds[1]
    return row in fastest_of(parts) and all(slowest < other.expected.middle for other in exact)


def _rules(holds: Callable[[Row, Sequence[Row]], bool], *strategies: str) -> tuple[Rule, ...]:
    return tuple(Rule(strategy, holds) for strategy in strategies)


PLUS_PLUS = ("zero3_hpz", "zero3_plus_plus", "zero3_qwz", "zero3_qgz")
# Lower stages communicate less. Stage 2 goes before stage 1, which holds whole gradients for longer and is no faster;
# where accumulation makes stage 2 slower, it is not among the fastest. ZeRO++ comes once a stage below 3 is out of the
# question; hpZ first, which changes no number. FSDP2 shares out as much as stage 3.
PLACES = (
    Place(
        "on the GPUs",
        _rules(_leaves_room, "ddp", "zero0", "zero2", "zero1")
        + _rules(_is_faster, *PLUS_PLUS)
        + _rules(_leaves_room, "zero3", "fsdp2"),
    ),
    Place("in the memory of each node", _rules(_leaves_room, "zero2_offload", "zero3_offload")),
    Place("on NVMe", _rules(_leaves_room, "zero3_offload_infinity", "zero3_infinity")),
)
ORDER = tuple(rule.strategy for place in PLACES for rule in place.rules)


@dataclass(frozen=True)
class Recommendation:
    """What to run, and the rows that speak for it. Neither `chosen` nor `changed` where nothing was found that fits."""

    rows: Sequence[Row]
    gpu: Gpu
    chosen: Row | None = None  # fits as the recipe is
    as_fast: Sequence[Row] = ()  # as fast as the fastest, within the estimate's own error; `chosen` is one of them
    offloading: Row | None = None  # the fastest other row that fits by offload
    smaller_gpus: Sequence[str] = ()  # the least that would take `chosen` too
    changed: Row | None = None  # where no row fits: the one whose change costs least
    other_arithmetic: Sequence[Row] = ()  # these fit too, and train otherwise: states in 16 bits, torch_autocast

    @property
    def fitting(self) -> list[Row]:
        return [row for row in self.rows if row.fit.status == "fits" and row not in self.other_arithmetic]

    @property
    def change(self) -> Change | None:
        return self.changed and self.changed.change

    @property
    def job(self) -> Job | None:
        found = self.chosen or self.change
        return found and found.job


def recommend(rows: Sequence[Row], gpu: Gpu, known: Mapping[str, Gpu]) -> Recommendation:
    """What the first place that holds a strategy says by its rules; else the change of all rows that costs least.

    As fast: on average no slower than the slow end of the fastest row's range, for the estimate is no better than its
    range. Strategies with another arithmetic are never chosen beside others. `rows`: of one machine. `known`: all GPUs,
    to name a smaller one.
    """
    other = [row for row in rows if changes_arithmetic(row.job)]
    other = other if len(other) < len(rows) else []
    exact = [row for row in rows if row not in other]
    fitting_otherwise = [row for row in other if row.fit.status == "fits"]
    fitting = [row for row in exact if row.fit.status == "fits"]
    if not fitting:
        changed = [row for row in exact if row.change]
        least = min(changed, key=lambda row: _cost_of(row.change, gpu), default=None)
        return Recommendation(rows, gpu, changed=least, other_arithmetic=fitting_otherwise)
    place, found = next((place, found) for place in PLACES if (found := _in(place, fitting)))
    chosen = _by_rules(place, found)
    alike = [row for row in found if (kind(row.job) in PLUS_PLUS) == (kind(chosen.job) in PLUS_PLUS)]
    offloading = [row for row in fitting if row.offloads and row is not chosen]
    slower = min(offloading, key=lambda row: row.expected.middle, default=None)
    smaller = _smaller_gpus(chosen, gpu, known)
    return Recommendation(rows, gpu, chosen, fastest_of(alike), slower, smaller, other_arithmetic=fitting_otherwise)


def kind(job: Job) -> str:
    """The strategy of ORDER that `job` is one of, whatever its name and its other settings."""
    zero = job.zero
    if job.ds_config is None:
        return "fsdp2" if job.is_fsdp else "ddp"
    if job.on_nvme:
        return "zero3_offload_infinity" if "cpu" in map(zero.offload_device, OFFLOADS) else "zero3_infinity"
    if zero.offloads:
        return "zero3_offload" if job.zero_stage == 3 else "zero2_offload"
    parts = [zero.hpz_partition_size != 1, zero.quantizes_weights, zero.quantizes_gradients]
    if any(parts):
        single = dict(zip(("zero3_hpz", "zero3_qwz", "zero3_qgz"), parts, strict=True))
        return "zero3_plus_plus" if sum(parts) > 1 else next(name for name, has in single.items() if has)
    return f"zero{job.zero_stage}"


def changes_arithmetic(job: Job) -> bool:
    """Whether it trains with other numbers than mixed precision does: optimizer states in 16 bits, or torch_autocast,
    which keeps fp32 weights. (ZeRO++'s quantised collectives round too; they have rules of their own.)"""
    return job.zero.bf16_masters or job.zero.bf16_states or job.zero.autocast is not None


def fastest_of(rows: Sequence[Row]) -> list[Row]:
    """Those that are as fast as the fastest one, within the error of its estimate."""
    fastest = min(rows, key=lambda row: row.expected.middle, default=None)
    return [row for row in rows if row.expected.middle <= fastest.expected.step_seconds[1]]


def _in(place: Place, rows: Sequence[Row]) -> list[Row]:
    names = {rule.strategy for rule in place.rules}
    found = [row for row in rows if kind(row.job) in names]
    return sorted(found, key=lambda row: (ORDER.index(kind(row.job)), -row.fit.margin))


def _by_rules(place: Place, found: Sequence[Row]) -> Row:
    for rule in place.rules:
        for row in found:
            if kind(row.job) == rule.strategy and rule.holds(row, found):
                return row
    return max(fastest_of(_without_plus_plus(found)), key=lambda row: row.fit.margin)


def _without_plus_plus(rows: Sequence[Row]) -> list[Row]:
    """All of them where ZeRO++ is all there is: only a comparison tells whether it is worth its rounding."""
    return [row for row in rows if kind(row.job) not in PLUS_PLUS] or list(rows)


def _cost_of(change: Change, gpu: Gpu) -> tuple[int, float]:
    return COST_ORDER.index(change.costliest), estimate(change.job, change.prediction, gpu).middle


def _smaller_gpus(chosen: Row, gpu: Gpu, known: Mapping[str, Gpu]) -> list[str]:
    """The smallest GPUs that would do as well: memory does not depend on the class."""
    able = [other for other in known.values() if other.bf16 or chosen.prediction.precision != "bf16"]
    enough = [other for other in able if fit_of(chosen.prediction, other.memory_bytes).status == "fits"]
    least = min((other.memory_bytes for other in enough), default=gpu.memory_bytes)
    return [other.name for other in enough if other.memory_bytes == least < gpu.memory_bytes]
