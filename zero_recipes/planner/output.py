"""The plan as it is written: for the terminal, as JSON and into a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from zero_recipes.core import units
from zero_recipes.core.tables import Column, print_columns
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner import recommend, table
from zero_recipes.planner.advice import Fix
from zero_recipes.planner.cost import cost
from zero_recipes.planner.question import Question
from zero_recipes.planner.recommend import Recommendation, host_memory
from zero_recipes.planner.rows import Row, smallest
from zero_recipes.report import plan_plot

SCHEMA = 1
VERDICT_STYLE = {"fits": "bold green", "tight": "bold yellow", "no": "bold red"}
CANNOT_KNOW = [
    "Fragmentation beyond the range given; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it small.",
    "torch.compile, mixtures of experts (which tokens go where) and quantised weights.",
    "Answers to sample prompts and evaluation with a larger batch; other programs on the same GPU.",
]


@dataclass(frozen=True)
class Answer:
    """Everything that was found out. `chosen`: the rows of the smallest machine on which a strategy fits."""

    question: Question
    rows: Sequence[Row]
    chosen: Sequence[Row]
    refused: dict[int, str]  # {number of GPUs: why the recipe cannot run on so many}
    most: dict[int, dict[str, int]]  # {id of a row: its largest micro batch and longest sequences}; empty unless asked
    advice: Recommendation
    price: float | None  # of one GPU for one hour


def document(answer: Answer) -> dict[str, Any]:
    """The answer as JSON can hold it."""
    question, rows = answer.question, answer.rows
    return {
        "schema": SCHEMA,
        "recipe": str(question.recipe.path),
        "overrides": question.overrides,
        "model": rows[0].job.model,
        "gpu": question.gpu.model_dump() | {"memory_bytes": question.gpu.memory_bytes},
        "rows": [_row(row, answer) for row in rows],
        "refused": {str(count): why for count, why in answer.refused.items()},
        "smallest_machine": smallest(rows, with_offload=True),
        "smallest_machine_without_offload": smallest(rows, with_offload=False),
        "recommendation": asdict(answer.advice),
        "rule_of_thumb": recommend.beside(answer.chosen),
        "cannot_know": CANNOT_KNOW,
    }


def _row(row: Row, answer: Answer) -> dict[str, Any]:
    return {
        "strategy": row.job.strategy,
        "world_size": row.job.world_size,
        "gpus_per_node": row.job.gpus_per_node,
        "verdict": row.verdict.word,
        "margin_bytes": row.verdict.margin,
        "host_lacks_bytes": row.verdict.host_lacks,
        "prediction": row.prediction,
        "step_seconds": list(row.speed.step_seconds),
        "tokens_per_step": row.speed.tokens_per_step,
        "tokens_per_second": list(row.speed.tokens_per_second),
        "cost": None if answer.price is None else asdict(cost(row.job, row.speed, answer.price)),
        "cure": None if row.fix is None else _fix(row.fix, answer.question),
        "max": answer.most.get(id(row)),
    }


def _fix(fix: Fix, question: Question) -> dict[str, Any]:
    return {
        "words": fix.words,
        "strategy": fix.job.strategy,
        "world_size": fix.job.world_size,
        "margin_bytes": fix.verdict.margin,
        "allocated_peak_bytes": fix.prediction["allocated_peak_bytes"],
        "reserved_bytes": fix.prediction["reserved_bytes"],
        "host_bytes": fix.prediction["host_bytes"],
        "command": question.command(fix.job),
    }


SOURCES = {"engine": "the engine simulated", "formulas": "textbook formulas"}


def write(answer: Answer, folder: Path) -> None:
    """plan.json, plan.md and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(document(answer), indent=2) + "\n")
    chosen, setting = answer.chosen, _setting(answer)
    lines = [setting, "", table.markdown(chosen, answer.price), *(f"- {line}" for line in _notes(chosen))]
    (folder / "plan.md").write_text("\n".join(lines) + "\n")
    bars = [_bar(row.job.strategy, row.prediction) for row in chosen]
    plan_plot.draw(bars, answer.question.gpu.memory_bytes, "Planned memory", setting, folder / "plan.png")


def _bar(name: str, prediction: Prediction) -> plan_plot.Bar:
    reserved = prediction["reserved_bytes"]
    return plan_plot.Bar(name, prediction["at_peak"], (reserved["low"], reserved["high"]))


def _notes(rows: Sequence[Row]) -> list[str]:
    """What a reader needs to know of the columns and of these predictions."""
    return [*table.NOTES, *dict.fromkeys(note for row in rows for note in row.prediction["notes"])]


def _setting(answer: Answer) -> str:
    """Model, batch and machine in one line."""
    row = answer.chosen[0]
    first = row.prediction
    model = (row.job.model or "").removeprefix("./")
    sources = {row.prediction["source"] for row in answer.chosen}
    source = " and, *, ".join(words for name, words in SOURCES.items() if name in sources)
    return (
        f"{model}, {row.job.world_size} x {answer.question.gpu.name}, {first['precision']}, "
        f"micro batch {first['micro_batch_size']} x {first['max_length']} tokens; {source}"
    )


def show(answer: Answer, console: Console) -> None:
    """Tables, cures, the recommendation with its reasons and its command, and what a plan cannot know."""
    question, chosen, advice = answer.question, answer.chosen, answer.advice
    if len(question.counts) > 1:
        _show_machines(answer, console)
    console.print(Text(_setting(answer), style="bold"))
    table.print_rows(chosen, answer.price, console)
    if answer.most:
        _show_limits(answer, console)
    for line in _notes(chosen):
        console.print(Text(line, style="dim"))
    for row in chosen:
        if row.verdict.word != "fits" and (row.fix or len(question.counts) == 1):
            fixed = _fixed(row.fix) if row.fix else "none was found"
            said = Text.assemble((row.job.strategy, VERDICT_STYLE[row.verdict.word]), f": the mildest fix: {fixed}")
            console.print(said)
    console.print(Text(f"\nRecommended: {advice.strategy or 'another machine'}", style="bold"))
    for line in (*advice.reasons, *recommend.beside(chosen)):
        console.print(Text(line))
    if advice.command:
        console.print(Text(f"\n{advice.command}\n"), soft_wrap=True)
    console.print(Text("What this plan cannot know:", style="dim"))
    for line in CANNOT_KNOW:
        console.print(Text(f"  {line}", style="dim"))


def _show_limits(answer: Answer, console: Console) -> None:
    most = answer.most
    named = [Column("Strategy", lambda row: row.job.strategy)]
    others = [
        Column("Largest\nmicro batch", lambda row: f"{most[id(row)]['micro_batch_size']:,}"),
        Column("Longest\nsequences", lambda row: f"{most[id(row)]['max_length']:,}"),
    ]
    print_columns(named, others, answer.chosen, console)


def _fixed(fix: Fix) -> str:
    host = host_memory(fix.prediction)
    return f"{fix.words} ({units.size(fix.verdict.margin)} left{f'; {host}' if host else ''})"


def _show_machines(answer: Answer, console: Console) -> None:
    """One line a number of GPUs, one column a strategy."""
    question, rows = answer.question, answer.rows
    console.print(Text(f"Which machine runs {question.recipe.path}?", style="bold"))
    asked = [name for _ in range(len(rows) // len(question.strategies)) for name in question.strategies]
    found = {(row.job.world_size, name): row for row, name in zip(rows, asked, strict=True)}  # alone ddp is "single"

    def cell(line: dict, name: str) -> str:
        row = found.get((line["count"], name))
        return "-" if row is None else row.verdict.word

    named = [Column("GPUs", lambda line: str(line["count"]))]
    others = [Column(name, partial(cell, name=name)) for name in question.strategies]
    print_columns(named, others, [{"count": count} for count in question.counts], console)
    for count, why in answer.refused.items():
        console.print(Text(f"{count}: {why}", style="dim"))
    for offload, said in ((True, "Smallest machine"), (False, "Without offload")):
        count = smallest(rows, offload)
        named_gpus = "no number of these GPUs" if count is None else f"{count} x {question.gpu.name}"
        console.print(Text(f"{said}: {named_gpus}"))
    console.print()
