"""What to change where a job does not fit, and how far it can grow where it does: by predictions, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import Strategies, why_not, with_hpz
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
