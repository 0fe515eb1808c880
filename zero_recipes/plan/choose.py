"""What to run: the rules of the choice in their order, or the change that costs least where nothing fits.

And how far a job can grow. By predictions, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zero_recipes.config.ds_config import OFFLOADS, DsConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import Gpu
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.cost import Speed, estimate
from zero_recipes.plan.job import Job, PlanRequest, Strategies, why_not, with_hpz
from zero_recipes.plan.predict import Fit, Predict, fit_of

MOST_GPUS = 1024
MOST_SEQUENCES = 4096  # a micro batch beyond it gains nothing
LENGTH_STEP = 64  # tokens; tensor cores want multiples of it
# what a change costs: first time, then another way of training, then money
COST_ORDER = ("nothing", "evaluation", "checkpointing", "micro batch", "stage", "offload", "LoRA", "GPUs")


@dataclass(frozen=True)
class Change:
    """From a job to one that fits. `costliest`: of COST_ORDER."""

    start: Job
    costliest: str
    job: Job
    prediction: Prediction
    fit: Fit


def costliest_change(*changes: str) -> str:
    return max(changes, key=COST_ORDER.index)


def smallest_change(
    job: Job,
    capacity: int,
    predict: Predict,
    strategies: Strategies,
    host: int | None = None,
    nvme: int | None = None,
) -> Change | None:
    """The first change, in COST_ORDER, under which `job` fits into `capacity` bytes; None where none does.

    Each setting is tried as it is, with activation checkpointing and with smaller micro batches, unless its peak is
    where smaller activations change nothing. `strategies`: where higher stages and offload come from. `host`, `nvme`:
    bytes of each machine's memory and NVMe, None where they are not known; without NVMe none is used.
    """
    for setting, changed in _settings(job, _eligible(job, strategies, nvme)):
        for extra, smaller in _smaller(changed):
            try:
                prediction = predict(smaller)
            except Refusal:  # e.g. LoRA without target modules for this architecture
                break
            fit = fit_of(prediction, capacity, host, nvme)
            if (
                fit.status != "fits" and prediction.peak_phase == "evaluation"
            ):  # it keeps less than a training step does
                settings = smaller.settings
                size = min(settings.per_device_eval_batch_size, settings.per_device_train_batch_size)
                extra = costliest_change(extra, "evaluation")
                smaller = smaller.changed(per_device_eval_batch_size=size)
                prediction = predict(smaller)
                fit = fit_of(prediction, capacity, host, nvme)
            if fit.host_lacks or fit.nvme_lacks or _beyond_smaller_activations(prediction, capacity):
                break
            if fit.status == "fits" and smaller is not job:
                return Change(job, costliest_change(setting, extra), smaller, prediction, fit)
    return None


def _eligible(job: Job, strategies: Strategies, nvme: int | None) -> Strategies:
    """Those that this machine can run, and that train with the job's arithmetic."""
    found = {}
    for name, config in strategies.items():
        changed = _under(job, name, strategies)
        alike = _arithmetic(changed.zero) == _arithmetic(job.zero)
        on_disk = changed.on_nvme and nvme is None and not job.on_nvme
        if name == job.strategy or (alike and not on_disk and why_not(changed) is None):
            found[name] = config
    return found


def _arithmetic(zero: DsConfig) -> tuple:
    return zero.adam_bytes, zero.autocast, zero.quantizes_weights, zero.quantizes_gradients


def _settings(job: Job, strategies: Strategies) -> Iterator[tuple[str, Job]]:
    """(of COST_ORDER, the job): as it is, higher stages, offload, LoRA, more GPUs."""
    yield "nothing", job
    views = {name: DsConfig(config or {}) for name, config in strategies.items()}
    flat = [name for name, zero in views.items() if not zero.offloads]
    for name in flat:
        if views[name].stage > job.zero.stage:
            yield "stage", _under(job, name, strategies)
    if not job.zero.offloads:
        for name, zero in views.items():
            if zero.offloads and zero.stage >= job.zero.stage:
                yield "offload", _under(job, name, strategies)
    if not job.settings.use_peft:
        yield "LoRA", job.changed(use_peft=True)
    highest = max(flat, key=lambda name: views[name].stage, default=job.strategy)
    spread = [job] if highest == job.strategy else [job, _under(job, highest, strategies)]
    ranks = 2 * job.world_size
    while ranks <= MOST_GPUS:
        for changed in spread:
            more = _on(changed, ranks)
            if more is not None and changed.zero.stage > 0:  # without shards more GPUs do not help
                yield "GPUs", more
        ranks *= 2


def _smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """(of COST_ORDER, the job): as it is, recomputing activations, and its micro batch halved again and again."""
    yield "nothing", job
    recomputing = job
    if not job.recomputes:
        recomputing = job.changed(activation_checkpointing=True)
        yield "checkpointing", recomputing
    batch = job.settings.per_device_train_batch_size
    passes = job.settings.gradient_accumulation_steps
    for smaller in (size for size in range(batch // 2, 0, -1) if batch % size == 0):
        sizes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": passes * batch // smaller}
        if recomputing is not job:
            yield "micro batch", job.changed(**sizes)
        yield "micro batch", recomputing.changed(**sizes)


def _on(job: Job, ranks: int) -> Job | None:
    """The same global batch on more ranks where it can be divided; None where the recipe fixes it and it cannot."""
    batch, passes = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    total = job.world_size * batch * passes
    if total % (ranks * batch) == 0:
        passes = total // (ranks * batch)
    elif job.settings.global_batch_size is not None:
        return None
    node = job.gpus_per_node if job.gpus_per_node < job.world_size else min(ranks, max(8, job.gpus_per_node))
    return replace(job.changed(gradient_accumulation_steps=passes), world_size=ranks, gpus_per_node=node)


def _under(job: Job, name: str, strategies: Strategies) -> Job:
    config = with_hpz(strategies[name], job.ranks_per_node)
    return replace(job.changed(deepspeed=config), strategy=name, ds_config=config)


def _beyond_smaller_activations(prediction: Prediction, capacity: int) -> bool:
    """Whether the states alone, or the optimizer step or the best model's states, are too large."""
    in_step = prediction.peak_phase in ("step", "best model") and prediction.reserved_bytes.low > capacity
    return in_step or prediction.state_bytes > capacity


@dataclass(frozen=True)
class Limits:
    """How far a job can grow on its GPUs."""

    micro_batch_size: int  # sequences of the recipe's max_length
    max_length: int  # tokens, with the recipe's micro batch


def limits_of(job: Job, capacity: int, predict: Predict, guess: Predict) -> Limits:
    """By `predict`, looked for near those by `guess`, which costs nothing."""
    batch, length = largest_micro_batch(job, capacity, guess), longest_sequence(job, capacity, guess)
    return Limits(largest_micro_batch(job, capacity, predict, batch), longest_sequence(job, capacity, predict, length))


def largest_micro_batch(job: Job, capacity: int, predict: Predict, start: int = 1) -> int:
    """Sequences of the recipe's max_length in one micro batch; 0 where not even one fits. `start`: a guess."""
    return largest(lambda size: _fits(job, capacity, predict, per_device_train_batch_size=size), MOST_SEQUENCES, start)


def longest_sequence(job: Job, capacity: int, predict: Predict, start: int = LENGTH_STEP) -> int:
    """Tokens, a multiple of 64, with the recipe's micro batch; 0 where not even 64 fit. `start`: a guess.

    No longer than the positions that the model's config has.
    """
    positions = job.config.get("max_position_embeddings") or job.config.get("n_positions") or 131072
    fits = lambda steps: _fits(job, capacity, predict, max_length=LENGTH_STEP * steps)  # noqa: E731
    return LENGTH_STEP * largest(fits, positions // LENGTH_STEP, start // LENGTH_STEP)


def _fits(job: Job, capacity: int, predict: Predict, **values: int) -> bool:
    # a recipe's global_batch_size speaks of its own micro batch
    changed = job.changed(global_batch_size=None, **values)
    return fit_of(predict(changed), capacity).status == "fits"


def largest(fits: Callable[[int], bool], most: int, start: int) -> int:
    """The largest size up to `most` that fits, if whatever is smaller than a size that fits does so too; 0 for none.

    From `start` in growing steps, then by bisection: near a good guess few sizes are predicted.
    """
    good, bad, step = 0, most + 1, max(1, start // 8)
    size = min(max(start, 1), most)
    while bad - good > 1:
        good, bad = (size, bad) if fits(size) else (good, size)
        beyond = min(good + step, most) if good else max(bad - step, 1)
        size = (good + bad) // 2 if good and bad <= most else beyond
        step *= 2
    return good


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
