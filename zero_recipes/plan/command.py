"""`zero-recipes plan`: what a recipe needs on which GPUs, and what to do."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress

from rich.markup import escape
from rich.progress import Progress

from zero_recipes.core.findings import Refusal
from zero_recipes.core.tables import terminal
from zero_recipes.plan import output
from zero_recipes.plan.cost import calibrated, read_measured
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import PlanRequest, read_request
from zero_recipes.plan.predict import Predictor
from zero_recipes.plan.recommend import recommend, rows_of, smallest_machine, with_limits


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The verb; `rest` overrides the recipe's keys. Returns 0. Raises Refusal for what cannot be planned."""
    request, predict = read_request(arguments, rest), Predictor(arguments.quick)
    if not arguments.quick:
        _simulate(request, predict)
    factor = None
    if arguments.calibrate:
        factor = calibrated(read_measured(arguments.calibrate), request, predict)
    rows, refused, excluded = rows_of(request, predict, factor)
    if arguments.max:
        quick = Predictor(quick=True)
        rows = [with_limits(row, request.gpu, predict, quick) for row in rows]
    chosen = smallest_machine(rows)
    advice = recommend(chosen, request.gpu, request.known)
    answer = output.Answer(request, rows, chosen, refused, excluded, advice, arguments.price)
    if arguments.output_dir:
        output.write_answer(answer, arguments.output_dir)
    if arguments.json:
        print(json.dumps(output.document(answer), indent=2))
    else:
        output.print_answer(answer, terminal())
    return 0


def _simulate(request: PlanRequest, predictor: Predictor) -> None:
    """All strategies and counts side by side, with a bar; the predictor then knows them."""
    jobs = []
    for count in request.counts:
        with suppress(Refusal):  # `rows_of` reports it
            made = {strategy: request.job(strategy, count) for strategy in request.strategies}
            jobs += [job for strategy, job in made.items() if not request.excluded(strategy, job)]
    with Progress(*Progress.get_default_columns(), console=terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(jobs))

        def done(job: Job) -> None:
            progress.update(task, advance=1, description=escape(f"simulated {job.strategy} on {job.world_size}"))

        predictor.prepare(jobs, done)
