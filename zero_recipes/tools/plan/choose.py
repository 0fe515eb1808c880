"""What to run: the rules of the choice in their order, or the change that costs least where nothing fits.

And how far a job can grow. By predictions, never guessed.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import Gpu
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.cost import Speed, estimate
from zero_recipes.tools.plan.formulas import overheads
from zero_recipes.tools.plan.job import Job, PlanRequest, Strategies, why_not
from zero_recipes.tools.plan.predict import Fit, Predict, fit_of

MOST_SEQUENCES = 4096  # a micro batch beyond it gains nothing
LIGHTER: dict[str, dict] = {"LoRA": {"use_peft": True}}
LIGHTER["QLoRA"] = {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
LENGTH_STEP = 64  # tokens; tensor cores want multiples of it
# what a change costs: first time, then another way of training
COST_ORDER = ("nothing", "checkpointing", "micro batch", "stage", "offload", "LoRA")
# the strategies of each place of the model states (on the GPUs, in the memory of each node, on NVMe), both in the order
# in which they are tried. Lower stages communicate less; stage 2 goes before stage 1, which holds whole gradients for
# longer and is no faster. ZeRO++ comes last, hpZ first of it, which changes no number.
PLACES = (
    ("ddp", "zero0", "zero2", "zero1", "zero3", "fsdp2", "zero3_hpz", "zero3_plus_plus", "zero3_qwz", "zero3_qgz"),
    ("zero2_offload", "zero3_offload"),
    ("zero3_offload_infinity", "zero3_infinity"),
)
ORDER = tuple(strategy for place in PLACES for strategy in place)


@dataclass(frozen=True)
class Change:
    """From a job to one that fits. `costliest`: of COST_ORDER."""

    start: Job
    costliest: str
    job: Job
    prediction: Prediction
    fit: Fit


def smallest_change(
    job: Job, capacity: int, predict: Predict, strategies: Strategies, host: int | None = None, nvme: int | None = None
) -> Change | None:
    """The first change, in COST_ORDER, under which `job` fits into `capacity` bytes, or None. Higher
    stages and offload are those of `strategies`. `host`, `nvme`: bytes of each machine, where known."""
    for setting, changed in _settings(job, strategies, nvme):
        for extra, smaller in _smaller(changed):
            try:
                prediction = predict(smaller)
            except Refusal:  # e.g. LoRA without target modules for this architecture
                break
            fit = fit_of(prediction, capacity, host, nvme)
            if fit.has_slack and smaller is not job:
                return Change(job, max(setting, extra, key=COST_ORDER.index), smaller, prediction, fit)
            peaks = prediction.peaks or {prediction.peak_phase: prediction.allocated_peak_bytes}
            least = max(prediction.state_bytes, peaks.get("step", 0), peaks.get("best model", 0))
            beside = prediction.reserved_bytes.low - prediction.allocated_peak_bytes
            if fit.host_lacks or fit.nvme_lacks or overheads().cached[0] * least + beside > capacity:
                break  # smaller activations change nothing
    return None


def _settings(job: Job, strategies: Strategies, nvme: int | None) -> Iterator[tuple[str, Job]]:
    """(of COST_ORDER, the job): as it is, higher stages, offload, LoRA. Strategies that this machine can run, and that
    train with the job's arithmetic."""
    yield "nothing", job
    kinds = [("stage", False)] if job.zero.offloads else [("stage", False), ("offload", True)]
    for costs, offloads in kinds:
        for name, config in strategies.items():
            changed = job.under(name, config)
            alike = _arithmetic(changed.zero) == _arithmetic(job.zero) and changed.zero.offloads == offloads
            higher = changed.zero.stage >= job.zero.stage + (not offloads)
            on_disk = changed.on_nvme and nvme is None
            if alike and higher and not on_disk and why_not(changed) is None:
                yield costs, changed
    if not job.settings.use_peft:
        yield "LoRA", job.changed(use_peft=True).under(job.strategy, strategies.get(job.strategy, job.ds_config))


def _arithmetic(zero: DsConfig) -> tuple:
    return zero.adam_bytes, zero.autocast, zero.quantizes_weights, zero.quantizes_gradients


def _smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """(of COST_ORDER, the job): as it is, recomputing activations, and with smaller micro batches."""
    yield "nothing", job
    ways = [job] if job.recomputes else [job, job.changed(activation_checkpointing=True)]
    for changed in ways[1:]:
        yield "checkpointing", changed
    batch, passes = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    for smaller in (size for size in range(batch // 2, 0, -1) if batch % size == 0):
        sizes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": passes * batch // smaller}
        for changed in ways:
            yield "micro batch", changed.changed(**sizes)


@dataclass(frozen=True)
class Limits:
    """How far a job can grow on its GPUs; 0 where not even the least fits."""

    micro_batch_size: int  # sequences of the recipe's max_length
    max_length: int  # tokens, a multiple of 64 within the model's positions, with the recipe's micro batch


def limits_of(job: Job, capacity: int, predict: Predict, guess: Predict) -> Limits:
    """By `predict`, looked for near those by `guess`, which costs nothing."""
    positions = job.config.get("max_position_embeddings") or job.config.get("n_positions") or 131072

    def fits(by: Predict, **values: int) -> bool:  # a recipe's global_batch_size is for its own micro batch
        return fit_of(by(job.changed(global_batch_size=None, **values)), capacity).has_slack

    batch = length = 1
    for by in (guess, predict):
        batch = largest(lambda size, by=by: fits(by, per_device_train_batch_size=size), MOST_SEQUENCES, batch)
        length = largest(lambda n, by=by: fits(by, max_length=LENGTH_STEP * n), positions // LENGTH_STEP, length)
    return Limits(batch, LENGTH_STEP * length)


def largest(fits: Callable[[int], bool], most: int, start: int) -> int:
    """The largest size up to `most` that fits, 0 for none: by bisection, near `start` if it is there."""
    low, high = 0, most
    for size in (start * 3 // 4, start * 5 // 4):
        if low < size < high:
            low, high = (size, high) if fits(size) else (low, size - 1)
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda size: not fits(size))


@dataclass(frozen=True)
class Row:
    """One strategy on one number of GPUs."""

    job: Job
    prediction: Prediction
    fit: Fit
    speed: Speed  # of the rows; where their lengths are not known, every sequence is taken to be as long as it may be
    change: Change | None = None  # only where it does not fit, and where there is one
    limits: Limits | None = None  # only where they are requested

    @property
    def runs(self) -> bool:
        return self.fit.runs


def make_row(request: PlanRequest, job: Job, predict: Predict) -> Row:
    prediction = predict(job)
    fit = fit_of(prediction, request.gpu.memory_bytes, request.host, request.nvme)
    return Row(job, prediction, fit, estimate(job, prediction, request.gpu, request.lengths))


def rows_of(request: PlanRequest, jobs: Sequence[Job], predict: Predict) -> list[Row]:
    """A row for each job. Changes are looked for where one count is requested, or nothing fits, on the most GPUs."""
    rows = [make_row(request, job, predict) for job in jobs]
    if len(request.counts) > 1 and any(row.runs for row in rows):
        return rows
    most, machine = max(job.world_size for job in jobs), (request.strategies, request.host, request.nvme)
    changes = [
        None if row.runs or row.job.world_size < most else smallest_change(row.job, row.fit.capacity, predict, *machine)
        for row in rows
    ]
    return [replace(row, change=change) for row, change in zip(rows, changes, strict=True)]


def fewest_gpus(rows: Sequence[Row]) -> int | None:
    """The fewest GPUs on which a strategy fits."""
    return min((row.job.world_size for row in rows if row.runs), default=None)


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
    def job(self) -> Job | None:
        found = self.chosen or self.change
        return found and found.job


def recommend(rows: Sequence[Row], gpu: Gpu) -> Recommendation:
    """Of the first place that holds a strategy, of the fastest with slack (of all, where none has it): the first that
    fits, else the one that leaves most. So a tight one or ZeRO++ wins only beyond the error of the estimates. Where
    nothing fits, the change of all rows that costs least. Other arithmetics are never chosen beside others. `rows`: of
    one machine."""
    exact = [row for row in rows if not changes_arithmetic(row.job)] or list(rows)
    fitting = [row for row in exact if row.runs]
    otherwise = [row for row in rows if row not in exact and row.runs]
    if not fitting:
        costs = lambda one: (COST_ORDER.index(one.costliest), estimate(one.job, one.prediction, gpu).middle)  # noqa: E731
        least = min((row.change for row in exact if row.change), key=costs, default=None)
        return Recommendation(rows, gpu, change=least, other_arithmetic=otherwise)
    ordered = sorted(fitting, key=lambda row: (ORDER.index(kind(row.job)), -row.fit.margin))
    here = next(found for place in PLACES if (found := [row for row in ordered if kind(row.job) in place]))
    here = [row for row in here if row.fit.has_slack] or here
    as_fast = fastest_of(here)
    with_room = (row for row in as_fast if row.fit.status == "fits")
    chosen = next(with_room, None) or max(as_fast, key=lambda row: row.fit.margin)
    return Recommendation(rows, gpu, chosen, as_fast, other_arithmetic=otherwise)


def on_each_machine(rows: Sequence[Row], gpu: Gpu) -> list[Recommendation]:
    """What to run on each number of GPUs, in their order."""
    counts = dict.fromkeys(row.job.world_size for row in rows)
    return [recommend([row for row in rows if row.job.world_size == count], gpu) for count in counts]


def best_machine(machines: Sequence[Recommendation], by_price: bool) -> Recommendation:
    """The fewest GPUs on which a strategy fits, or those on which a token costs least; the most where none fits."""
    token = lambda row: row.job.world_size * row.speed.middle / row.speed.tokens_per_step  # noqa: E731
    price = lambda advice: token(advice.chosen) if by_price else advice.chosen.job.world_size  # noqa: E731
    return min((advice for advice in machines if advice.chosen), key=price, default=machines[-1])


def lighter(request: PlanRequest, advice: Recommendation, predict: Predict, guess: Predict) -> dict[str, Row]:
    """LoRA and QLoRA in place of what the recipe trains, each under the strategy that `guess` recommends."""
    found, settings = {}, request.recipe.settings
    ways = {} if settings.load_in_4bit or settings.load_in_8bit else LIGHTER
    for name in list(ways)[int(settings.use_peft) :]:
        with suppress(Refusal):  # LoRA without target modules for this architecture
            jobs = [row.job.changed(**ways[name]) for row in advice.rows]
            jobs = [job.under(job.strategy, request.strategies.get(job.strategy, job.ds_config)) for job in jobs]
            guessed = [make_row(request, job, guess) for job in jobs]
            best = recommend(guessed, request.gpu).chosen or max(guessed, key=lambda row: row.fit.margin)
            found[name] = make_row(request, best.job, predict)
    return found


def fastest_of(rows: Sequence[Row]) -> list[Row]:
    """Those that are on average no slower than the slow end of the fastest one's range, its own error."""
    fastest = min(rows, key=lambda row: row.speed.middle, default=None)
    return [row for row in rows if row.speed.middle <= fastest.speed.step_seconds[1]]


def kind(job: Job) -> str:
    """The strategy of ORDER that `job` is one of, whatever its name and its other settings."""
    if job.ds_config is None:
        return "fsdp2" if job.is_fsdp else "ddp"
    return max((name for name in ORDER if job.zero.name.startswith(name)), key=len)


def changes_arithmetic(job: Job) -> bool:
    """Whether it trains with other numbers than mixed precision does. (ZeRO++ rounds too, and has its own rules.)"""
    return job.zero.bf16_masters or job.zero.bf16_states or job.zero.autocast is not None
