"""What `zero-recipes plan` was asked on its command line, read and checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from zero_recipes.config.recipe import Recipe, steps_by_epochs
from zero_recipes.core.errors import Refusal
from zero_recipes.planner.hardware import Gpu, gpu_named, gpus
from zero_recipes.planner.job import Job
from zero_recipes.planner.jobs import Strategies, job_of, model_config, read_recipe, read_strategies
from zero_recipes.planner.rows import launch_command


@dataclass(frozen=True)
class Question:
    """What was asked on the command line, read and checked."""

    recipe: Recipe
    overrides: list[str]
    config: dict[str, Any]
    strategies: Strategies
    counts: list[int]
    gpus_per_node: int
    gpu: Gpu
    known: dict[str, Gpu]
    host: int | None  # bytes of each machine's memory, where it was said
    rows: int | None = None  # of the data, where a run by epochs has it at hand

    def job(self, strategy: str, count: int) -> Job:
        ds_config = self.strategies[strategy]
        job = job_of(self.recipe, self.config, strategy, ds_config, count, self.gpus_per_node)
        if self.rows is None:
            return job
        steps = steps_by_epochs(self.rows, job.settings, count // (job.settings.sequence_parallel_size or 1))
        return replace(job, settings=job.settings.replace(max_steps=steps))

    def command(self, job: Job) -> str:
        return launch_command(self.recipe, self.overrides, job)


def read_question(arguments: argparse.Namespace, overrides: list[str]) -> Question:
    known = gpus(arguments.hardware)
    gpu = gpu_named(arguments.gpu, known)
    recipe = read_recipe(arguments.recipe, overrides)
    names = None if arguments.strategies is None else [n.strip() for n in arguments.strategies.split(",") if n.strip()]
    counts = _counts(arguments.gpus, arguments.gpus_per_node)
    strategies = read_strategies(recipe, names)
    config = model_config(recipe.settings)
    host = None if arguments.host_memory is None else int(arguments.host_memory * 1e9)
    asked = (recipe, overrides, config, strategies, counts, arguments.gpus_per_node, gpu, known, host)
    return Question(*asked, _rows_by_epochs(recipe))


def _rows_by_epochs(recipe: Recipe) -> int | None:
    if recipe.settings.max_steps > 0:
        return None
    from zero_recipes.data.load import rows_on_disk

    return rows_on_disk(recipe.settings)


def _counts(text: str, per_node: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    counts = sorted({int(part) for part in parts if part.isdigit()} - {0})
    if not counts or len(counts) < len(set(parts)):
        raise Refusal(
            "ZR805", f"--gpus {text}", "It is a number of GPUs, or several by comma.", "--gpus 2, or --gpus 1,2,4,8"
        )
    uneven = [count for count in counts if per_node < 1 or (count > per_node and count % per_node)]
    if uneven:
        raise Refusal(
            "ZR806",
            f"--gpus {uneven[0]} with {per_node} in each machine",
            "Every machine of a launch has the same number of processes.",
            f"--gpus_per_node N, a number that divides {uneven[0]}.",
        )
    return counts
