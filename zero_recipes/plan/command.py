"""`zero-recipes plan`: what a recipe needs on which GPUs, and what to do."""

import argparse
import json
from dataclasses import replace

from zero_recipes.core.tables import terminal
from zero_recipes.plan import output
from zero_recipes.plan.choose import limits_of, recommend, rows_of, smallest_machine
from zero_recipes.plan.cost import calibrated
from zero_recipes.plan.job import read_request
from zero_recipes.plan.predict import Predictor


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The verb; `rest` overrides the recipe's keys. Returns 0. Raises Refusal for what cannot be planned."""
    request, predict = read_request(arguments, rest), Predictor(arguments.quick)
    jobs, excluded = request.jobs()
    if not arguments.quick:  # all side by side; the predictor then knows them
        predict.prepare(jobs)
    factor = calibrated(arguments.calibrate, request, predict) if arguments.calibrate else None
    rows = rows_of(request, jobs, predict, factor)
    if arguments.max:
        quick, memory = Predictor(quick=True), request.gpu.memory_bytes
        rows = [replace(row, limits=limits_of(row.job, memory, predict, quick)) for row in rows]
    advice = recommend(smallest_machine(rows), request.gpu)
    answer = output.Answer(request, rows, excluded, advice, arguments.price)
    if arguments.output_dir:
        output.write_answer(answer, arguments.output_dir)
    if arguments.json:
        print(json.dumps(output.document(answer), indent=2))
    else:
        output.print_answer(answer, terminal())
    return 0
