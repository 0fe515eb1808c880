"""What to do where a job does not fit: the mildest change that does, tried with the same prediction, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_recipes.core.errors import Refusal
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner.formulas.predict import checkpointed
from zero_recipes.planner.job import Job
from zero_recipes.planner.jobs import Strategies
from zero_recipes.planner.verdict import Verdict, judge

Predict = Callable[[Job], Prediction]

MOST_GPUS = 1024
# from mild to harsh: what a fix costs is time first, then another way of training, then money
MILDNESS = ("nothing", "checkpointing", "micro batch", "stage", "offload", "LoRA", "GPUs")


@dataclass(frozen=True)
class Fix:
    """A changed job that fits. `harshest`: of MILDNESS."""

    words: str
    harshest: str
    job: Job
    prediction: Prediction
    verdict: Verdict

    @property
    def mildness(self) -> int:
        return MILDNESS.index(self.harshest)


def smallest_fix(
    job: Job, capacity: int, predict: Predict, strategies: Strategies, host: int | None = None
) -> Fix | None:
    """The first change, in the order of MILDNESS, under which `job` fits into `capacity` bytes; None where none does.

    Each stronger setting is tried as it is, with activation checkpointing and with smaller micro batches, unless its
    peak stands where smaller activations change nothing. `strategies`: where higher stages and offload come from.
    `host`: bytes of each machine's memory, None where it is not known.
    """
    for harshest, words, changed in _settings(job, strategies):
        for extra, words_of_batch, smaller in _smaller(changed):
            try:
                prediction = predict(smaller)
            except Refusal:  # e.g. LoRA without target modules for this architecture
                break
            verdict = judge(prediction, capacity, host)
            if verdict.host_lacks or _beyond_smaller_activations(prediction, capacity):
                break
            if verdict.word == "fits" and smaller is not job:
                said = " and ".join(word for word in (words, words_of_batch) if word)
                worst = max(harshest, extra, key=MILDNESS.index)
                return Fix(said, worst, smaller, prediction, verdict)
    return None


def _settings(job: Job, strategies: Strategies) -> Iterator[tuple[str, str, Job]]:
    """(how harsh, in words, the job): as it is, higher stages, offload, LoRA, more GPUs."""
    yield "nothing", "", job
    higher = [
        name for name in strategies if _stage(strategies[name]) > _stage(job.ds_config) and _sharded(strategies[name])
    ]
    for name in (name for name in higher if not _offloads(strategies[name])):
        yield "stage", name, _under(job, name, strategies)
    if not _offloads(job.ds_config):
        for name in (name for name in strategies if _offloads(strategies[name])):
            if _stage(strategies[name]) >= _stage(job.ds_config):
                yield "offload", name, _under(job, name, strategies)
    if not job.settings.use_peft:
        yield "LoRA", "LoRA (use_peft: true)", _with(job, use_peft=True)
    ranks = 2 * job.world_size
    while ranks <= MOST_GPUS:
        yield from _on_more(job, ranks, strategies)
        ranks *= 2


def _on_more(job: Job, ranks: int, strategies: Strategies) -> Iterator[tuple[str, str, Job]]:
    """The job on more GPUs, as it is and under the highest stage; without shards more GPUs do not help."""
    highest = max((name for name in strategies if not _offloads(strategies[name])), key=lambda n: _stage(strategies[n]))
    under = {job.strategy: job, highest: _under(job, highest, strategies)}
    for name, changed in under.items():
        more = _on(changed, ranks)
        if more is not None and _sharded(changed.ds_config):
            beside = "" if name == job.strategy else f" under {name}"
            yield "GPUs", f"{ranks} GPUs{beside}", more


def _smaller(job: Job) -> Iterator[tuple[str, str, Job]]:
    """The job as it is, recomputing activations, and with its micro batch halved again and again."""
    yield "nothing", "", job
    words, recomputing = "", job
    if not checkpointed(job.settings):
        words, recomputing = "activation checkpointing", _with(job, activation_checkpointing=True)
        yield "checkpointing", words, recomputing
    batch = job.settings.per_device_train_batch_size
    passes = job.settings.gradient_accumulation_steps
    for smaller in (size for size in range(batch // 2, 0, -1) if batch % size == 0):
        more = passes * batch // smaller
        changes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": more}
        said = f"micro batches of {smaller} with {more} accumulations"
        if recomputing is not job:
            yield "micro batch", said, _with(job, **changes)
        yield "micro batch", " and ".join(word for word in (words, said) if word), _with(recomputing, **changes)


def _on(job: Job, ranks: int) -> Job | None:
    """The same global batch on more ranks where it can be divided; None where the recipe fixes it and it cannot."""
    batch, passes = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    total = job.world_size * batch * passes
    if total % (ranks * batch) == 0:
        passes = total // (ranks * batch)
    elif job.settings.global_batch_size is not None:
        return None
    node = job.gpus_per_node if job.gpus_per_node < job.world_size else min(ranks, max(8, job.gpus_per_node))
    return replace(_with(job, gradient_accumulation_steps=passes), world_size=ranks, gpus_per_node=node)


def _under(job: Job, name: str, strategies: Strategies) -> Job:
    config = strategies[name]
    return replace(_with(job, deepspeed=config), strategy=name, ds_config=config)


def _with(job: Job, **changes: Any) -> Job:
    return replace(job, settings=job.settings.replace(**changes))


def _stage(config: Mapping[str, Any] | None) -> int:
    return 0 if config is None else config.get("zero_optimization", {}).get("stage", 0)


def _sharded(config: Mapping[str, Any] | None) -> bool:
    return _stage(config) > 0


def _offloads(config: Mapping[str, Any] | None) -> bool:
    zero = (config or {}).get("zero_optimization", {})
    return any((zero.get(key) or {}).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param"))


def _beyond_smaller_activations(prediction: Prediction, capacity: int) -> bool:
    """The model states alone are too large, or the optimizer step, where no activation is left."""
    states = sum(prediction["model_state_bytes"][part] for part in ("params", "grads", "optimizer"))
    in_step = prediction["peak_phase"] == "step" and prediction["reserved_bytes"]["low"] > capacity
    return in_step or states > capacity
