"""`zero-recipes plan`: what a recipe needs on which GPUs, as tables, a recommendation, a picture and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from zero_recipes.plan import limits, picture, planning, predictor, rules, table
from zero_recipes.plan.advice import Cure, Predict
from zero_recipes.plan.hardware import Gpu, gpu_named, gpus
from zero_recipes.plan.job import Job, Prediction
from zero_recipes.plan.planning import Row
from zero_recipes.plan.question import Strategies, job_of, model_config, read_recipe, read_strategies
from zero_recipes.plan.recommendation import Recommendation, host_memory, recommend
from zero_recipes.plan.speed import cost, read_measured
from zero_recipes.recipe import Recipe
from zero_recipes.refusal import Refusal
from zero_recipes.report import units
from zero_recipes.report.table import Column, print_columns

SCHEMA = 1
VERDICT_STYLE = {"fits": "bold green", "tight": "bold yellow", "no": "bold red"}
CANNOT_KNOW = [
    "Fragmentation beyond the range given; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it small.",
    "torch.compile, mixtures of experts (which tokens go where) and quantised weights.",
    "Answers to sample prompts and evaluation with a larger batch; other programs on the same GPU.",
]


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

    def job(self, strategy: str, count: int) -> Job:
        ds_config = self.strategies[strategy]
        return job_of(self.recipe, self.config, strategy, ds_config, count, self.gpus_per_node)

    def command(self, job: Job) -> str:
        return planning.launch_command(self.recipe, self.overrides, job)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The verb; `rest` overrides the recipe's keys. Returns 0. Raises Refusal for what cannot be planned."""
    question = read_question(arguments, rest)
    console = Console(stderr=arguments.json)
    with _watched(predictor.for_command(arguments.quick), console) as predict:
        factor = None
        if arguments.calibrate:
            measured = read_measured(arguments.calibrate)
            rest_of = (question.recipe, question.config, question.strategies, question.gpu)
            factor = planning.calibrated(measured, *rest_of, predict)
        rows, refused = _rows(question, predict, factor)
        most = {id(row): _most(row, question.gpu, predict) for row in rows} if arguments.max else {}
    chosen = _smallest_machine(rows)
    advice = recommend(chosen, question.gpu, question.known, question.command)
    document = _document(question, rows, refused, most, advice, arguments.price, chosen)
    if arguments.output_dir:
        _write(arguments.output_dir, document, chosen, question)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return 0
    _print(question, rows, refused, most, advice, arguments, chosen, console)
    return 0


def read_question(arguments: argparse.Namespace, overrides: list[str]) -> Question:
    known = gpus(arguments.hardware)
    gpu = gpu_named(arguments.gpu, known)
    recipe = read_recipe(arguments.recipe, overrides)
    names = None if arguments.strategies is None else [n.strip() for n in arguments.strategies.split(",") if n.strip()]
    counts = _counts(arguments.gpus, arguments.gpus_per_node)
    strategies = read_strategies(recipe, names)
    config = model_config(recipe.values)
    return Question(recipe, overrides, config, strategies, counts, arguments.gpus_per_node, gpu, known)


def _counts(text: str, per_node: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    counts = sorted({int(part) for part in parts if part.isdigit()} - {0})
    if not counts or len(counts) < len(set(parts)):
        raise Refusal(f"--gpus {text}", "It is a number of GPUs, or several by comma.", "--gpus 2, or --gpus 1,2,4,8")
    uneven = [count for count in counts if per_node < 1 or (count > per_node and count % per_node)]
    if uneven:
        raise Refusal(
            f"--gpus {uneven[0]} with {per_node} in each machine",
            "Every machine of a launch has the same number of processes.",
            f"--gpus_per_node N, a number that divides {uneven[0]}.",
        )
    return counts


def _rows(question: Question, predict: Predict, factor: float | None) -> tuple[list[Row], dict[int, str]]:
    """(a row for each strategy and count, {count: why the recipe cannot run on so many}). Raises Refusal for none."""
    rows, refused, last = [], {}, None
    for count in question.counts:
        try:
            jobs = [question.job(strategy, count) for strategy in question.strategies]
        except Refusal as refusal:
            refused[count], last = refusal.what, refusal
            continue
        with_cure = len(question.counts) == 1
        make = partial(planning.make_row, gpu=question.gpu, predict=predict, strategies=question.strategies)
        rows += [make(job, factor=factor, with_cure=with_cure) for job in jobs]
    if not rows:
        raise last
    if len(question.counts) > 1 and not any(row.verdict.word == "fits" for row in rows):
        largest = max(row.job.world_size for row in rows)
        rows = [make(row.job, factor=factor) if row.job.world_size == largest else row for row in rows]
    return rows, refused


def _smallest(rows: Sequence[Row], with_offload: bool) -> int | None:
    """The fewest GPUs on which a strategy fits."""
    fitting = [row for row in rows if row.verdict.word == "fits" and (with_offload or not row.speed.offloading[1])]
    return min((row.job.world_size for row in fitting), default=None)


def _smallest_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the fewest GPUs on which a strategy fits; of the most where none does."""
    count = _smallest(rows, with_offload=True) or max(row.job.world_size for row in rows)
    return [row for row in rows if row.job.world_size == count]


def _most(row: Row, gpu: Gpu, predict: Predict) -> dict[str, int]:
    return {
        "micro_batch_size": limits.largest_micro_batch(row.job, gpu.memory_bytes, predict),
        "max_length": limits.longest_sequence(row.job, gpu.memory_bytes, predict),
    }


@contextmanager
def _watched(predict: Predict, console: Console) -> Iterator[Predict]:
    """`predict` that asks nothing twice and shows on a terminal what it is at."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("planning", total=None)

        def ask(job: Job) -> Prediction:
            batch = job.values["per_device_train_batch_size"]
            progress.update(task, description=f"{job.strategy} on {job.world_size} GPUs, micro batch {batch}")
            return predict(job)

        yield planning.remembered(ask)


# ---------------------------------------------------------------- what is written


def _document(
    question: Question,
    rows: Sequence[Row],
    refused: dict[int, str],
    most: dict[int, dict[str, int]],
    advice: Recommendation,
    price: float | None,
    chosen: Sequence[Row],
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "recipe": str(question.recipe.path),
        "overrides": question.overrides,
        "model": rows[0].job.model,
        "gpu": question.gpu.model_dump() | {"memory_bytes": question.gpu.memory_bytes},
        "rows": [_row(row, most.get(id(row)), price, question) for row in rows],
        "refused": {str(count): why for count, why in refused.items()},
        "smallest_machine": _smallest(rows, with_offload=True),
        "smallest_machine_without_offload": _smallest(rows, with_offload=False),
        "recommendation": asdict(advice),
        "rule_of_thumb": rules.beside(chosen),
        "cannot_know": CANNOT_KNOW,
    }


def _row(row: Row, most: dict[str, int] | None, price: float | None, question: Question) -> dict[str, Any]:
    return {
        "strategy": row.job.strategy,
        "world_size": row.job.world_size,
        "gpus_per_node": row.job.gpus_per_node,
        "verdict": row.verdict.word,
        "margin_bytes": row.verdict.margin,
        "prediction": row.prediction,
        "step_seconds": list(row.speed.step_seconds),
        "tokens_per_step": row.speed.tokens_per_step,
        "tokens_per_second": list(row.speed.tokens_per_second),
        "cost": None if price is None else asdict(cost(row.job, row.speed, price)),
        "cure": None if row.cure is None else _cure(row.cure, question),
        "max": most,
    }


def _cure(cure: Cure, question: Question) -> dict[str, Any]:
    return {
        "words": cure.words,
        "strategy": cure.job.strategy,
        "world_size": cure.job.world_size,
        "margin_bytes": cure.verdict.margin,
        "allocated_peak_bytes": cure.prediction["allocated_peak_bytes"],
        "reserved_bytes": cure.prediction["reserved_bytes"],
        "host_bytes": cure.prediction["host_bytes"],
        "command": question.command(cure.job),
    }


def _write(folder: Path, document: dict[str, Any], chosen: Sequence[Row], question: Question) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(document, indent=2) + "\n")
    bars = [picture.Bar(row.job.strategy, row.prediction) for row in chosen]
    picture.draw(bars, question.gpu.memory_bytes, "Planned memory", _setting(question, chosen), folder / "plan.png")


def _setting(question: Question, rows: Sequence[Row]) -> str:
    """Model, batch and machine in one line."""
    first = rows[0].prediction
    model = (rows[0].job.model or "").removeprefix("./")
    source = {"engine": "the engine simulated", "formulas": "textbook formulas"}[first["source"]]
    return (
        f"{model}, {rows[0].job.world_size} x {question.gpu.name}, {first['precision']}, "
        f"micro batch {first['micro_batch_size']} x {first['max_length']} tokens; {source}"
    )


def _print(
    question: Question,
    rows: Sequence[Row],
    refused: dict[int, str],
    most: dict[int, dict[str, int]],
    advice: Recommendation,
    arguments: argparse.Namespace,
    chosen: Sequence[Row],
    console: Console,
) -> None:
    if len(question.counts) > 1:
        console.print(Text(f"Which machine runs {question.recipe.path}?", style="bold"))
        _print_machines(question, rows, refused, console)
    console.print(Text(_setting(question, chosen), style="bold"))
    table.print_rows(chosen, arguments.price, console)
    if most:
        named = [Column("Strategy", lambda row: row.job.strategy)]
        others = [
            Column("Largest\nmicro batch", lambda row: f"{most[id(row)]['micro_batch_size']:,}"),
            Column("Longest\nsequences", lambda row: f"{most[id(row)]['max_length']:,}"),
        ]
        print_columns(named, others, chosen, console)
    notes = dict.fromkeys(note for row in chosen for note in row.prediction["notes"])
    for line in (*table.NOTES, *notes):
        console.print(Text(line, style="dim"))
    for row in chosen:
        if row.verdict.word != "fits" and (row.cure or len(question.counts) == 1):
            cured = _cured(row.cure) if row.cure else "none was found"
            said = Text.assemble((row.job.strategy, VERDICT_STYLE[row.verdict.word]), f": the mildest cure: {cured}")
            console.print(said)
    console.print(Text(f"\nRecommended: {advice.strategy or 'another machine'}", style="bold"))
    for line in (*advice.reasons, *rules.beside(chosen)):
        console.print(Text(line))
    if advice.command:
        console.print(Text(f"\n{advice.command}\n"), soft_wrap=True)
    console.print(Text("What this plan cannot know:", style="dim"))
    for line in CANNOT_KNOW:
        console.print(Text(f"  {line}", style="dim"))


def _cured(cure: Cure) -> str:
    host = host_memory(cure.prediction)
    return f"{cure.words} ({units.size(cure.verdict.margin)} left{f'; {host}' if host else ''})"


def _print_machines(question: Question, rows: Sequence[Row], refused: dict[int, str], console: Console) -> None:
    """One line a number of GPUs, one column a strategy."""
    found = {(row.job.world_size, name): row for row, name in zip(rows, _asked(question, rows), strict=True)}
    counts = [{"count": count} for count in question.counts]

    def cell(line: dict, name: str) -> str:
        row = found.get((line["count"], name))
        return "-" if row is None else row.verdict.word

    named = [Column("GPUs", lambda line: str(line["count"]))]
    print_columns(named, [Column(name, partial(cell, name=name)) for name in question.strategies], counts, console)
    for count, why in refused.items():
        console.print(Text(f"{count}: {why}", style="dim"))
    for offload, said in ((True, "Smallest machine"), (False, "Without offload")):
        smallest = _smallest(rows, offload)
        names = "no number of these GPUs" if smallest is None else f"{smallest} x {question.gpu.name}"
        console.print(Text(f"{said}: {names}"))
    console.print()


def _asked(question: Question, rows: Sequence[Row]) -> list[str]:
    """The strategy that each row was asked for: on one GPU ddp is called single."""
    return [name for _ in range(len(rows) // len(question.strategies)) for name in question.strategies]
