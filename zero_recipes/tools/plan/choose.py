"""What to run: by rules in their order, or the change that costs least where nothing fits. How far a job can grow."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from zero_recipes.checks.capacity import LITTLE
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.core.gpus import Gpu
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.cost import Speed, estimate
from zero_recipes.tools.plan.formulas import overheads
from zero_recipes.tools.plan.job import (
    Job,
    PlanRequest,
    Strategies,
    in_own_dtype,
    shares_nothing,
    warned,
    why_not,
)
from zero_recipes.tools.plan.predict import Fit, Predict, fit_of
from zero_recipes.tools.plan.shape import shape_of

MOST_SEQUENCES = 4096  # a micro batch beyond it gains nothing
LENGTH_STEP = 64  # tokens; tensor cores want multiples of it
NEARLY = 1.1  # times as long may a job take that fits for sure
GAIN = 0.97  # of the time, for which larger micro batches are worth a change
MOST_FREE_SEQUENCES = 256  # of a step, where nobody asked for a batch: usual for fine-tuning
# what a change costs: first time, then another way of training
COST_ORDER = ("nothing", "checkpointing", "micro batch", "stage", "offload", "LoRA")
# The strategies of each place of the model states (GPUs, host memory, NVMe), in the order in which they are tried.
# Lower stages communicate less; stage 2 goes before stage 1, which holds whole gradients for longer and is no faster.
# ZeRO++ comes last, hpZ first of it, which changes no number.
PLACES = (
    ("ddp", "zero0", "zero2", "zero1", "zero3", "fsdp2", "zero3_hpz", "zero3_plus_plus", "zero3_qwz", "zero3_qgz"),
    ("zero2_offload", "zero3_offload"),
    ("zero3_offload_infinity", "zero3_infinity"),
)
ORDER = [name for place in PLACES for name in place]
# what a plan shows in the recipe's place
LIGHTER = {
    "LoRA": {"use_peft": True},
    "QLoRA": {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
}


@dataclass(frozen=True)
class Change:
    """A change from a job that does not fit to one that does. `costliest`: of COST_ORDER."""

    start: Job
    costliest: str
    job: Job
    prediction: Prediction
    fit: Fit


def smallest_change(
    job: Job,
    capacity: int,
    predict: Predict,
    strategies: Strategies,
    host: int | None = None,
    nvme: int | None = None,
    usual_host: int | None = None,
) -> Change | None:
    """The first change, in COST_ORDER, under which `job` fits.

    `capacity`: bytes of a GPU. `host`, `nvme`: of each machine, where known. `usual_host`: see `fit_of`.
    """
    for setting, changed in _settings(job, strategies, nvme):
        for extra, smaller in _smaller(changed):
            try:
                prediction = predict(smaller)
            except Refusal:  # e.g. LoRA without target modules for this architecture
                break
            fit = fit_of(prediction, capacity, host, nvme, usual_host)
            if fit.is_sure and smaller is not job:
                return Change(job, max(setting, extra, key=COST_ORDER.index), smaller, prediction, fit)
            lacks_machine = fit.host_lacks or fit.nvme_lacks or fit.host_beyond_usual
            if lacks_machine or _least_allocated(prediction) > overheads().usable_bytes(capacity):
                break  # smaller activations change nothing
    return None


def _least_allocated(prediction: Prediction) -> int:
    """Bytes that smaller activations do not reduce."""
    peaks = prediction.peaks or {prediction.peak_phase: prediction.allocated_peak_bytes}
    return max(prediction.state_bytes, peaks.get("step", 0), peaks.get("best model", 0))


def _settings(job: Job, strategies: Strategies, nvme: int | None) -> Iterator[tuple[str, Job]]:
    """(of COST_ORDER, the job): as it is, higher stages, offload, LoRA."""
    yield "nothing", job
    zero = job.zero
    alike = []
    for name, config in strategies.items():
        other = job.under(name, config)
        lacks_disk = other.on_nvme and nvme is None
        if _arithmetic(other.zero) == _arithmetic(zero) and not lacks_disk and why_not(other) is None:
            alike.append(other)
    yield from (("stage", other) for other in alike if other.zero.stage > zero.stage and not other.zero.offloads)
    if not zero.offloads:
        yield from (("offload", other) for other in alike if other.zero.stage >= zero.stage and other.zero.offloads)
    if not job.settings.use_peft:
        yield "LoRA", _trained_otherwise(job, strategies, use_peft=True)


def _arithmetic(zero: DsConfig) -> tuple:
    return zero.adam_bytes, zero.autocast, zero.quantizes_weights, zero.quantizes_gradients


def _trained_otherwise(job: Job, strategies: Strategies, **values: Any) -> Job:
    """Under its own strategy, whose "auto" values depend on what trains."""
    return in_own_dtype(job.changed(**values)).under(job.strategy, strategies.get(job.strategy, job.ds_config))


def _smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """(of COST_ORDER, the job): as it is, recomputing activations, with smaller micro batches."""
    yield "nothing", job
    ways = [job]
    if not job.recomputes:
        recomputing = job.changed(activation_checkpointing=True)
        yield "checkpointing", recomputing
        ways.append(recomputing)
    batch = job.settings.per_device_train_batch_size
    sequences = batch * job.settings.gradient_accumulation_steps
    for size in range(batch // 2, 0, -1):
        if batch % size == 0:
            sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": sequences // size}
            yield from (("micro batch", way.changed(**sizes)) for way in ways)


@dataclass(frozen=True)
class Limits:
    """How far a job can grow; 0 where not even the least fits."""

    micro_batch_size: int  # sequences of the recipe's max_length
    max_length: int  # a multiple of LENGTH_STEP, with the recipe's micro batch


def limits_of(job: Job, capacity: int, predict: Predict, guess: Predict) -> Limits:
    """Find the largest micro batch and the longest rows by `predict`.

    They are looked for near those by `guess`, which costs nothing.
    """
    guessed = _limits(job, capacity, guess, Limits(1, LENGTH_STEP))
    return _limits(job, capacity, predict, guessed)


def _limits(job: Job, capacity: int, predict: Predict, near: Limits) -> Limits:
    job = job.changed(global_batch_size=None)  # it is for the recipe's own micro batch

    def limit(key: str, step: int, most: int, start: int) -> int:
        def fits(steps: int) -> bool:
            return fit_of(predict(job.changed(**{key: step * steps})), capacity).is_sure

        return step * largest(fits, most // step, start // step)

    positions = job.config.get("max_position_embeddings") or job.config.get("n_positions") or 131072
    batch = limit("per_device_train_batch_size", 1, MOST_SEQUENCES, near.micro_batch_size)
    return Limits(batch, limit("max_length", LENGTH_STEP, positions, near.max_length))


def largest(fits: Callable[[int], bool], most: int, start: int) -> int:
    """The largest size up to `most` that fits, 0 for none: by bisection, near `start` if it is there."""
    low = 0
    high = most
    for size in (start * 3 // 4, start * 5 // 4):
        if low < size < high:
            if fits(size):
                low = size
            else:
                high = size - 1
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda size: not fits(size))


@dataclass(frozen=True)
class Row:
    """One strategy on one number of GPUs."""

    job: Job
    prediction: Prediction
    fit: Fit
    speed: Speed
    change: Change | None = None  # only where it does not fit
    limits: Limits | None = None  # only where they are requested

    @property
    def runs(self) -> bool:
        """Whether the job fits, surely or perhaps."""
        return self.fit.runs

    @property
    def seconds_a_token(self) -> float:
        """Seconds of the whole job for one token, in the middle of the range."""
        return self.speed.middle / self.speed.tokens_per_step


def make_row(request: PlanRequest, job: Job, predict: Predict) -> Row:
    """Predict a job's memory and time, and see whether it fits the request's machine."""
    prediction = predict(job)
    usual_host = request.gpu.usual_host_bytes(job.ranks_per_node)
    fit = fit_of(prediction, request.gpu.memory_bytes, request.host, request.nvme, usual_host)
    return Row(job, prediction, fit, estimate(job, prediction, request.gpu, request.lengths))


def rows_of(request: PlanRequest, jobs: Sequence[Job], predict: Predict) -> list[Row]:
    """Make a row of each job, with changes under which it fits.

    They are looked for where one count is requested, or nothing fits, on the most GPUs.
    """
    rows = [make_row(request, job, predict) for job in jobs]
    if len(request.counts) > 1 and fewest_gpus(rows) is not None:
        return rows
    most = max(job.world_size for job in jobs)
    for i, row in enumerate(rows):
        if not row.runs and row.job.world_size == most:
            usual_host = request.gpu.usual_host_bytes(row.job.ranks_per_node)
            machine = (request.strategies, request.host, request.nvme, usual_host)
            change = smallest_change(row.job, row.fit.capacity, predict, *machine)
            rows[i] = replace(row, change=change)
    return rows


def fewest_gpus(rows: Sequence[Row]) -> int | None:
    """The fewest GPUs on which a strategy fits."""
    return min((row.job.world_size for row in rows if row.runs), default=None)


@dataclass(frozen=True)
class Recommendation:
    """What to run, and the rows that speak for it. Neither `chosen` nor `change` where nothing fits."""

    rows: Sequence[Row]
    gpu: Gpu
    chosen: Row | None = None  # fits as the recipe is
    as_fast: Sequence[Row] = ()  # by `fastest_of`; `chosen` is one of them
    change: Change | None = None  # where no row fits: the one that costs least
    other_arithmetic: Sequence[Row] = ()  # fit too, and train otherwise: states in 16 bits, torch_autocast

    @property
    def job(self) -> Job | None:
        """The job to take: one that was planned, or one that was changed to fit."""
        found = self.chosen or self.change
        return found and found.job


def recommend(rows: Sequence[Row], gpu: Gpu) -> Recommendation:
    """Recommend one of the rows that fit, or a change.

    Of the first place that holds a strategy, the fastest of those that fit for sure, else the roomiest.
    Within the error of the estimates the first counts as fast, so ZeRO++ wins only beyond it.
    Where nothing fits, the change of all rows that costs least.
    Never what may not fit into a usual machine's memory beside what does, nor other arithmetics beside others, nor what
    `check` warns about (ZR138) beside what fits for sure.
    """
    exact = [row for row in rows if not changes_arithmetic(row.job)] or list(rows)
    fitting = [row for row in exact if row.runs]
    otherwise = [row for row in rows if row.runs and row not in exact]
    if not fitting:
        return Recommendation(rows, gpu, change=_least_change(exact, gpu), other_arithmetic=otherwise)
    fitting = [row for row in fitting if not row.fit.host_beyond_usual] or fitting
    fitting.sort(key=lambda row: ORDER.index(kind(row.job)))
    place = next(place for place in PLACES if kind(fitting[0].job) in place)
    here = [row for row in fitting if kind(row.job) in place]
    sure = [row for row in here if row.fit.is_sure]
    sharing = [row for row in sure if not shares_nothing(row.job)]
    as_fast = fastest_of(sharing or sure or here)
    chosen = as_fast[0] if sure else max(as_fast, key=lambda row: row.fit.margin)
    return Recommendation(rows, gpu, chosen, as_fast, other_arithmetic=otherwise)


def _least_change(rows: Sequence[Row], gpu: Gpu) -> Change | None:
    def costs(change: Change) -> tuple[int, float]:
        seconds = estimate(change.job, change.prediction, gpu).middle
        return COST_ORDER.index(change.costliest), seconds

    return min((row.change for row in rows if row.change), key=costs, default=None)


def on_each_machine(rows: Sequence[Row], gpu: Gpu) -> list[Recommendation]:
    """What to run on each number of GPUs, in their order."""
    machines: dict[int, list[Row]] = {}
    for row in rows:
        machines.setdefault(row.job.world_size, []).append(row)
    return [recommend(of_machine, gpu) for of_machine in machines.values()]


def best_machine(machines: Sequence[Recommendation]) -> Recommendation:
    """Recommend the machine on which a token costs least: the fewest GPU-seconds.

    At nearly that price, one on which the job fits for sure, and of these the smallest.
    The largest where nothing fits.
    """

    def costs(advice: Recommendation) -> float:
        speed = advice.chosen.speed
        return advice.chosen.job.world_size * speed.middle / speed.tokens_per_step

    fitting = [advice for advice in machines if advice.chosen]
    if not fitting:
        return machines[-1]
    least = min(map(costs, fitting))
    nearly = [advice for advice in fitting if costs(advice) <= NEARLY * least]
    sure = [advice for advice in nearly if advice.chosen.fit.is_sure]
    return min(sure or nearly, key=lambda advice: advice.chosen.job.world_size)


def lighter(request: PlanRequest, advice: Recommendation, predict: Predict, guess: Predict) -> dict[str, Row]:
    """LoRA and QLoRA in the recipe's place, each under the strategy that `guess` recommends."""
    settings = request.recipe.settings
    found = {}
    for name, values in LIGHTER.items():
        if settings.load_in_4bit or settings.load_in_8bit or (name == "LoRA" and settings.use_peft):
            continue  # as the recipe is, or lighter
        if name == "QLoRA" and _packs_little(advice.rows[0].job):
            continue  # ZR474, ZR481
        with suppress(Refusal):  # LoRA without target modules for this architecture
            jobs = [_trained_otherwise(row.job, request.strategies, **values) for row in advice.rows]
            guessed = [make_row(request, job, guess) for job in jobs]
            best = recommend(guessed, request.gpu).chosen or max(guessed, key=lambda row: row.fit.margin)
            found[name] = make_row(request, best.job, predict)
    return found


def _packs_little(job: Job) -> bool:
    """Whether 4 bits leave most of a model as it is: a mixture's experts, or linear layers of its own."""
    return shape_of(job.config, job.settings.replace(use_peft=False)).packed_share < LITTLE


def better(request: PlanRequest, chosen: Row, others: Sequence[Row], predict: Predict, guess: Predict) -> Row | None:
    """What to run in place of `chosen`; None where nothing is better.

    For one that may run out of memory: what fits for sure at nearly the same time, at last of `others`.
    For one that fits: larger micro batches that fit for sure and take less time a token. Instead of accumulation; where
    nobody asked for a batch, also of a larger global batch.
    """
    is_sure = chosen.fit.is_sure
    if not is_sure:
        jobs = [job for _, job in _smaller(chosen.job)][1:]
    elif request.batch_is_free:
        jobs = _of_free_batches(chosen.job)
    else:
        jobs = _instead_of_accumulation(chosen.job)
    longest = GAIN if is_sure else NEARLY

    def does(row: Row, beside: Row) -> bool:
        return row.fit.is_sure and row.seconds_a_token <= longest * beside.seconds_a_token

    guessed = make_row(request, chosen.job, guess)
    able = [row for row in (make_row(request, job, guess) for job in jobs) if does(row, guessed)]
    if request.batch_is_free and is_sure:  # the smallest that is nearly as fast as the fastest
        fastest = min((row.seconds_a_token for row in able), default=0.0)
        able.sort(key=lambda row: row.seconds_a_token > fastest / GAIN)
    for row in able:
        if not warned(row.job):
            row = make_row(request, row.job, predict)
            if does(row, chosen):
                return row
    return None if is_sure else next((row for row in others if does(row, chosen)), None)


def _instead_of_accumulation(job: Job) -> Iterator[Job]:
    """Larger micro batches at the same global batch, the largest first."""
    passes = job.settings.gradient_accumulation_steps
    sequences = job.settings.per_device_train_batch_size * passes
    for fewer in range(1, passes):
        if passes % fewer == 0:
            yield job.changed(per_device_train_batch_size=sequences // fewer, gradient_accumulation_steps=fewer)


def _of_free_batches(job: Job) -> Iterator[Job]:
    """Larger micro batches without accumulation, the smallest first, up to a usual global batch."""
    size = 2 * job.settings.per_device_train_batch_size
    while size * job.world_size <= MOST_FREE_SEQUENCES:
        yield job.changed(per_device_train_batch_size=size, gradient_accumulation_steps=1)
        size *= 2


def fastest_of(rows: Sequence[Row]) -> list[Row]:
    """Choose the rows that are on average no slower than the slow end of the fastest one's range, its own error."""
    fastest = min((row.speed for row in rows), key=lambda speed: speed.middle)
    return [row for row in rows if row.speed.middle <= fastest.step_seconds[1]]


def kind(job: Job) -> str:
    """The strategy of ORDER that `job` is one of, whatever its name."""
    if job.ds_config is None:
        return "fsdp2" if job.is_fsdp else "ddp"
    return max((name for name in ORDER if job.zero.name.startswith(name)), key=len)


def changes_arithmetic(job: Job) -> bool:
    """Whether it trains with other numbers than mixed precision does. ZeRO++ rounds too, and has its own rules."""
    return job.zero.bf16_masters or job.zero.bf16_states or job.zero.autocast is not None
