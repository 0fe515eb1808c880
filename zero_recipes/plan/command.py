"""`zero-recipes plan`: what a recipe needs on which GPUs, and what to do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from rich.markup import escape
from rich.progress import Progress

from zero_recipes.core.tables import terminal
from zero_recipes.plan import output
from zero_recipes.plan.choose import limits_of, recommend, rows_of, smallest_machine
from zero_recipes.plan.cost import calibrated, read_measured
from zero_recipes.plan.job import Job, read_request
from zero_recipes.plan.predict import Predictor


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The verb; `rest` overrides the recipe's keys. Returns 0. Raises Refusal for what cannot be planned."""
    request, predict = read_request(arguments, rest), Predictor(arguments.quick)
    jobs, refused, excluded = request.jobs()
    if not arguments.quick:
        _simulate(jobs, predict)
    factor = None
    if arguments.calibrate:
        factor = calibrated(read_measured(arguments.calibrate), request, predict)
    rows = rows_of(request, jobs, predict, factor)
    if arguments.max:
        quick = Predictor(quick=True)
        limits = [limits_of(row.job, request.gpu.memory_bytes, predict, quick) for row in rows]
        rows = [replace(row, limits=found) for row, found in zip(rows, limits, strict=True)]
    chosen = smallest_machine(rows)
    advice = recommend(chosen, request.gpu)
    answer = output.Answer(request, rows, chosen, refused, excluded, advice, arguments.price)
    if arguments.output_dir:
        output.write_answer(answer, arguments.output_dir)
    if arguments.json:
        print(json.dumps(output.document(answer), indent=2))
    else:
        output.print_answer(answer, terminal())
    return 0


def _simulate(jobs: Sequence[Job], predictor: Predictor) -> None:
    """All strategies and counts side by side, with a bar; the predictor then knows them."""
    with Progress(*Progress.get_default_columns(), console=terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(jobs))

        def done(job: Job) -> None:
            progress.update(task, advance=1, description=escape(f"simulated {job.strategy} on {job.world_size}"))

        predictor.prepare(jobs, done)
