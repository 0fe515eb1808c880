"""`zero-recipes plan`: what a recipe needs on which GPUs, and what to do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from zero_recipes.core.errors import Refusal
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner import limits, output
from zero_recipes.planner import predict as predictor
from zero_recipes.planner import rows as planning
from zero_recipes.planner.advice import Predict
from zero_recipes.planner.cost import read_measured
from zero_recipes.planner.formulas import predict as formulas
from zero_recipes.planner.hardware import Gpu
from zero_recipes.planner.job import Job
from zero_recipes.planner.output import Answer
from zero_recipes.planner.question import Question, read_question
from zero_recipes.planner.recommend import recommend
from zero_recipes.planner.rows import Row, smallest


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The verb; `rest` overrides the recipe's keys. Returns 0. Raises Refusal for what cannot be planned."""
    question = read_question(arguments, rest)
    if not arguments.quick:
        _simulate(question)
    with _watched(predictor.of(arguments.quick)) as predict:
        factor = None
        if arguments.calibrate:
            measured = read_measured(arguments.calibrate)
            asked = (question.recipe, question.config, question.strategies, question.gpu)
            factor = planning.calibrated(measured, *asked, predict)
        rows, refused = _rows(question, predict, factor)
        most = {id(row): _most(row, question.gpu, predict) for row in rows} if arguments.max else {}
    chosen = _smallest_machine(rows)
    advice = recommend(chosen, question.gpu, question.known, question.command)
    answer = Answer(question, rows, chosen, refused, most, advice, arguments.price)
    if arguments.output_dir:
        output.write(answer, arguments.output_dir)
    if arguments.json:
        print(json.dumps(output.document(answer), indent=2))
    else:
        output.show(answer, Console())
    return 0


def _simulate(question: Question) -> None:
    """All strategies and counts side by side, with a bar; `_rows` then finds their answers kept."""
    jobs = []
    for count in question.counts:
        with suppress(Refusal):  # `_rows` says it
            jobs += [question.job(strategy, count) for strategy in question.strategies]
    shown = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=shown, transient=True) as progress:
        task = progress.add_task("simulating", total=len(jobs))

        def done(job: Job) -> None:
            progress.update(task, advance=1, description=f"simulated {job.strategy} on {job.world_size}")

        predictor.prepare(jobs, done)


def _rows(question: Question, predict: Predict, factor: float | None) -> tuple[list[Row], dict[int, str]]:
    """(a row for each strategy and count, {count: why the recipe cannot run on so many}). Raises Refusal for none."""
    rows, refused, last = [], {}, None
    for count in question.counts:
        try:
            jobs = [question.job(strategy, count) for strategy in question.strategies]
        except Refusal as refusal:
            refused[count], last = refusal.what, refusal
            continue
        with_fix = len(question.counts) == 1
        told = dict(gpu=question.gpu, predict=predict, strategies=question.strategies, host=question.host)
        make = partial(planning.make_row, **told)
        rows += [make(job, factor=factor, with_fix=with_fix) for job in jobs]
    if not rows:
        raise last
    if len(question.counts) > 1 and not any(row.verdict.word == "fits" for row in rows):
        largest = max(row.job.world_size for row in rows)
        rows = [make(row.job, factor=factor) if row.job.world_size == largest else row for row in rows]
    return rows, refused


def _smallest_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the fewest GPUs on which a strategy fits; of the most where none does."""
    count = smallest(rows, with_offload=True) or max(row.job.world_size for row in rows)
    return [row for row in rows if row.job.world_size == count]


def _most(row: Row, gpu: Gpu, predict: Predict) -> dict[str, int]:
    """The limits by `predict`, looked for near those by formulas: these are free."""
    job, capacity = row.job, gpu.memory_bytes
    batch = limits.largest_micro_batch(job, capacity, formulas.predict)
    length = limits.longest_sequence(job, capacity, formulas.predict)
    return {
        "micro_batch_size": limits.largest_micro_batch(job, capacity, predict, batch),
        "max_length": limits.longest_sequence(job, capacity, predict, length),
    }


@contextmanager
def _watched(predict: Predict) -> Iterator[Predict]:
    """`predict` that asks nothing twice and shows on a terminal what it is at."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("planning", total=None)

        def ask(job: Job) -> Prediction:
            batch = job.settings.per_device_train_batch_size
            progress.update(task, description=f"{job.strategy} on {job.world_size} GPUs, micro batch {batch}")
            return predict(job)

        yield planning.remembered(ask)
