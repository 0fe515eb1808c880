"""Every strategy of a recipe held against one class of GPU: rows, and the command that runs a job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_recipes.config.recipe import Recipe
from zero_recipes.core.errors import Refusal
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner.advice import Fix, Predict, smallest_fix
from zero_recipes.planner.cost import Speed, calibration, estimate, same_kind
from zero_recipes.planner.hardware import Gpu
from zero_recipes.planner.job import Job
from zero_recipes.planner.jobs import Strategies, job_of
from zero_recipes.planner.verdict import Verdict, judge

CHANGED = ("activation_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "use_peft")


@dataclass(frozen=True)
class Row:
    """One strategy on one number of GPUs. `fix`: only where it does not fit, and where there is one."""

    job: Job
    prediction: Prediction
    verdict: Verdict
    speed: Speed
    fix: Fix | None = None


def remembered(predict: Predict) -> Predict:
    """The same prediction for the same job without asking twice: cures of several strategies meet."""
    known: dict[str, Prediction] = {}

    def ask(job: Job) -> Prediction:
        key = job.key({})
        if key not in known:
            known[key] = predict(job)
        return known[key]

    return ask


def make_row(
    job: Job,
    gpu: Gpu,
    predict: Predict,
    strategies: Strategies,
    factor: float | None = None,
    with_fix: bool = True,
    host: int | None = None,
) -> Row:
    """`factor`: measured over estimated seconds (plan/speed.py). `with_fix`: look for one where `job` does not fit.

    `host`: bytes of each machine's memory, None where it is not known.
    """
    prediction = predict(job)
    verdict = judge(prediction, gpu.memory_bytes, host)
    fix = None
    if with_fix and verdict.word != "fits":
        fix = smallest_fix(job, gpu.memory_bytes, predict, strategies, host)
    return Row(job, prediction, verdict, estimate(job, prediction, gpu, factor), fix)


def smallest(rows: Sequence[Row], with_offload: bool) -> int | None:
    """The fewest GPUs on which a strategy fits."""
    fitting = [row for row in rows if row.verdict.word == "fits" and (with_offload or not row.speed.offloading[1])]
    return min((row.job.world_size for row in fitting), default=None)


def calibrated(
    measured: Mapping[str, Any], recipe: Recipe, config: dict, strategies: Strategies, gpu: Gpu, predict: Predict
) -> float:
    """Measured over estimated seconds of a run of this recipe. Raises Refusal where it is a run of something else."""
    name = measured["strategy"]
    if name != "single" and name not in strategies:
        raise Refusal(
            "ZR815",
            f"--calibrate: {name} was measured, and the plan is for {', '.join(strategies)}",
            "Another strategy reaches another share of the GPU's rate.",
            f"Add it to --strategies, or calibrate with a run under {next(iter(strategies))}.",
        )
    ranks = measured["world_size"]
    job = same_kind(measured, job_of(recipe, config, name, strategies.get(name), ranks))
    return calibration(measured, job, predict(job), gpu)


def launch_command(recipe: Recipe, overrides: Sequence[str], job: Job) -> str:
    """What to type to run `job`: the recipe's own values are left out, what the plan changed is added."""
    asked = recipe.settings.global_batch_size is not None
    named = [key for key in CHANGED if not (asked and key == "gradient_accumulation_steps")]
    changed = {
        key: job.settings.as_dict()[key] for key in named if getattr(job.settings, key) != getattr(recipe.settings, key)
    }
    options = [*overrides, *(word for key, value in changed.items() for word in (f"--{key}", _written(value)))]
    script = ["run_sft.py", str(recipe.path), *options]
    machines = job.world_size // job.gpus_per_node
    if job.strategy == "single":
        return shlex.join(["python", *script])
    if recipe.settings.deepspeed is not None:
        meeting = ["--nnodes", str(machines), "--rdzv_backend", "c10d", "--rdzv_endpoint", "HOST:29500"]
        nodes = meeting if machines > 1 else []
        return shlex.join(["torchrun", *nodes, "--nproc_per_node", str(job.gpus_per_node), *script])
    launch = ["accelerate", "launch", "--config_file", f"accelerate_configs/{job.strategy}.yaml"]
    launch += ["--num_processes", str(job.world_size)]
    if machines > 1:
        launch += ["--num_machines", str(machines), "--machine_rank", "K", "--main_process_ip", "HOST"]
    return shlex.join([*launch, *script])


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
