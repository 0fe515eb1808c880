"""The plan of a run that is about to start: held against its GPU before a weight is loaded, and kept for the report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zero_recipes.config.run import RunConfig
from zero_recipes.core import codes
from zero_recipes.core.errors import Finding, Refusal, downgraded, first_line
from zero_recipes.core.host_limits import Host
from zero_recipes.core.process import local_world_size, rank
from zero_recipes.core.units import size
from zero_recipes.distributed.once_per_node import once_per_node
from zero_recipes.metrics.prediction import PredictedMetrics, Prediction
from zero_recipes.planner import jobs, messages
from zero_recipes.planner.advice import smallest_change
from zero_recipes.planner.fit import Fit, fit_of
from zero_recipes.planner.job import Job
from zero_recipes.planner.predict import Predict, Predictor


def plan(run: RunConfig) -> PredictedMetrics | None:
    """What metrics.json shows as "predicted"; None where the run is not planned. Every process calls it.

    On an accelerator, unless the recipe has `skip_plan: true`; on CPUs where it has `predict: true`. One process of
    each machine works. Raises Refusal on every process where the plan says no.
    """
    if not wanted(run):
        return None
    found = once_per_node(lambda: _as_json(*_work(run, os.environ)))
    if rank() == 0:
        print(*found["lines"], sep="\n", flush=True)
    return None if found["predicted"] is None else PredictedMetrics.model_validate(found["predicted"])


def _as_json(prediction: Prediction | None, line: str, findings: Sequence[Finding]) -> dict[str, Any]:
    carried = None if prediction is None else prediction.for_metrics.model_dump(mode="json")
    return {"predicted": carried, "lines": [line, *map(str, findings)]}


def wanted(run: RunConfig) -> bool:
    """Whether the run is planned at all."""
    settings = run.settings
    return settings.predict or (run.device == "cuda" and not settings.skip_plan)


def rehearsed(run: RunConfig, environment: Mapping[str, str]) -> list[Finding]:
    """What the run would be refused for, or warned of; for `zero-recipes check` on a machine with its GPU."""
    if run.device != "cuda" or not wanted(run):
        return []
    try:
        _, _, findings = _work(run, environment)
        return findings
    except Refusal as refusal:
        return refusal.findings


def _work(run: RunConfig, environment: Mapping[str, str]) -> tuple[Prediction | None, str, list[Finding]]:
    """(the prediction, a line for the log, findings). A plan that cannot be made stops no run: it is advice.

    Raises Refusal where the run does not fit.
    """
    findings: list[Finding] = []
    try:
        job, predict = job_of_run(run, environment), Predictor()
        prediction, fit = predict(job), None
        if run.device == "cuda" and not run.settings.skip_plan:
            fit = fit_of(prediction, gpu_memory())
            found = plan_findings(run, job, prediction, fit, predict)
            findings = downgraded(found, codes.requested(run.settings.ignore))
    except Exception as error:  # the engine's own code under simulation may raise anything
        return None, f"plan          none could be made: {first_line(error)}", []
    if any(finding.level == "error" for finding in findings):
        raise Refusal.of(findings)
    return prediction, f"plan          {messages.peak(prediction, fit)}", findings


def job_of_run(run: RunConfig, environment: Mapping[str, str]) -> Job:
    """The job that this run is. Raises Refusal where the model's config is not here."""
    settings, strategy = run.settings, run.strategy
    here = local_world_size(environment, strategy.world_size)
    device = "gpu" if run.device == "cuda" else "cpu"
    config = jobs.model_config(settings)
    model = settings.model_name_or_path
    ds_config = None if strategy.ds_config is None else dict(strategy.ds_config.raw)
    return Job(model, config, settings, strategy.name, ds_config, strategy.world_size, here, device)


def gpu_memory() -> int:
    """Bytes of this process's GPU."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def plan_findings(run: RunConfig, job: Job, prediction: Prediction, fit: Fit, predict: Predict) -> list[Finding]:
    """The run that does not fit, with what would. Formulas are too coarse to refuse for: by them it is a warning."""
    if fit.status != "no":
        return []
    parts = sorted(prediction.at_peak.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {size(held)}" for name, held in parts[:3] if held)
    gpus = f"{job.world_size} GPU{'s' if job.world_size > 1 else ''}"
    needs, has = size(prediction.reserved_bytes.low), size(fit.capacity)
    return [
        Finding(
            "ZR816",
            f"{job.strategy} on {gpus} needs at least {needs} on each, and this one has {has}",
            f"By {messages.SOURCES[prediction.source]}, the peak in {prediction.peak_phase}: {largest}. It would end "
            "out of memory.",
            f"{_what_helps(run, job, fit, predict)} zero-recipes plan compares all strategies; --skip_plan true "
            "runs it as it is.",
            level="error" if prediction.source == "engine" else "warning",
        )
    ]


def _what_helps(run: RunConfig, job: Job, fit: Fit, predict: Predict) -> str:
    strategies = jobs.strategies_here() | {job.strategy: job.ds_config}
    change = smallest_change(job, fit.capacity, predict, strategies, Host().memory()[0])
    if change is None:
        return "No change that was tried makes it fit: a smaller model, or GPUs with more memory."
    # the configuration came from the launcher or the command line: a command names its own
    recipe = replace(run.recipe, settings=run.settings.replace(deepspeed=None))
    words = messages.change_in_words(change)
    command = jobs.run_command(recipe, [], change.job)
    return f"{words[0].upper()}{words[1:]}, with the other options of this run: {command}."
