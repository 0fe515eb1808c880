"""The plan as it is written: for the terminal, as JSON and into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from zero_recipes.core.files import write_json
from zero_recipes.core.tables import Column, print_columns
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan import messages, table
from zero_recipes.plan.advice import Change
from zero_recipes.plan.cost import cost
from zero_recipes.plan.jobs import PlanRequest
from zero_recipes.plan.recommend import Recommendation, rule_of_thumb
from zero_recipes.plan.rows import Excluded, Row, fewest_gpus
from zero_recipes.report import plots

SCHEMA = 1
STATUS_STYLE = {"fits": "bold green", "tight": "bold yellow", "no": "bold red"}


@dataclass(frozen=True)
class Answer:
    """Everything that was found out. `chosen`: the rows of the smallest machine on which a strategy fits."""

    request: PlanRequest
    rows: Sequence[Row]
    chosen: Sequence[Row]
    refused: dict[int, str]  # {number of GPUs: why the recipe cannot run on so many}
    excluded: Excluded  # {number of GPUs: {strategy: why it is not planned}}
    advice: Recommendation
    price: float | None  # of one GPU for one hour


def document(answer: Answer) -> dict[str, Any]:
    """The answer as JSON can hold it."""
    request, rows = answer.request, answer.rows
    return {
        "schema": SCHEMA,
        "recipe": str(request.recipe.path),
        "overrides": request.overrides,
        "model": rows[0].job.model,
        "gpu": request.gpu.model_dump() | {"memory_bytes": request.gpu.memory_bytes},
        "row_lengths": {
            "mean_tokens": request.lengths and request.lengths.mean,
            "source": request.lengths.source if request.lengths else request.no_lengths,
        },
        "rows": [_row(row, answer) for row in rows],
        "refused": {str(count): why for count, why in answer.refused.items()},
        "not_planned": {str(count): reasons for count, reasons in answer.excluded.items()},
        "smallest_machine": fewest_gpus(rows, with_offload=True),
        "smallest_machine_without_offload": fewest_gpus(rows, with_offload=False),
        "recommendation": _recommendation(answer),
        "rule_of_thumb": [messages.rule(rule_of_thumb(answer.chosen))],
        "cannot_know": messages.CANNOT_KNOW,
    }


def _row(row: Row, answer: Answer) -> dict[str, Any]:
    return {
        "strategy": row.job.strategy,
        "world_size": row.job.world_size,
        "gpus_per_node": row.job.gpus_per_node,
        "verdict": row.fit.status,
        "margin_bytes": row.fit.margin,
        "host_lacks_bytes": row.fit.host_lacks,
        "nvme_lacks_bytes": row.fit.nvme_lacks,
        "resume_lacks_bytes": row.fit.resume_lacks,
        "prediction": row.prediction.model_dump(),
        "step_seconds": list(row.speed.step_seconds),
        "tokens_per_step": row.speed.tokens_per_step,
        "tokens_per_second": list(row.speed.tokens_per_second),
        "mfu": list(row.speed.mfu),
        "cost": None if answer.price is None else asdict(cost(row.job, row.speed, answer.price)),
        "real_rows": None if row.real is None else _of_real_rows(row, answer),
        "cure": None if row.change is None else _change(row.change, answer.request),
        "max": row.limits and asdict(row.limits),
    }


def _of_real_rows(row: Row, answer: Answer) -> dict[str, Any]:
    """What depends on how long the rows are, as in `_row`, where it is for sequences as long as they may be."""
    real, lengths = row.real, answer.request.lengths
    return {
        "step_seconds": list(real.step_seconds),
        "tokens_per_step": real.tokens_per_step,
        "tokens_per_second": list(real.tokens_per_second),
        "mfu": list(real.mfu),
        "cost": None if answer.price is None else asdict(cost(row.job, real, answer.price, lengths)),
    }


def _change(change: Change, request: PlanRequest) -> dict[str, Any]:
    prediction = change.prediction.model_dump()
    return {
        "words": messages.change_in_words(change),
        "strategy": change.job.strategy,
        "world_size": change.job.world_size,
        "margin_bytes": change.fit.margin,
        **{key: prediction[key] for key in ("allocated_peak_bytes", "reserved_bytes", "host_bytes")},
        "command": request.command(change.job),
    }


def _recommendation(answer: Answer) -> dict[str, Any]:
    job = answer.advice.job
    return {
        "strategy": job and job.strategy,
        "reasons": messages.reasons(answer.advice),
        "command": job and answer.request.command(job),
    }


def write_answer(answer: Answer, folder: Path) -> None:
    """plan.json, plan.md and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", document(answer))
    chosen, heading = answer.chosen, messages.heading(answer.chosen, answer.request.gpu)
    lines = [heading, "", table.markdown(chosen, answer.price, answer.request.lengths)]
    lines += [f"- {line}" for line in _notes(answer)]
    (folder / "plan.md").write_text("\n".join(lines) + "\n")
    bars = [_bar(row.job.strategy, row.prediction) for row in chosen]
    plots.draw_memory(bars, "Planned memory", heading, folder / "plan.png", answer.request.gpu.memory_bytes)


def _bar(name: str, prediction: Prediction) -> plots.Bar:
    reserved = prediction.reserved_bytes
    return plots.Bar(name, prediction.at_peak, reserved=(reserved.low, reserved.high))


def _notes(answer: Answer) -> list[str]:
    """What a reader needs to know of the columns and of these predictions."""
    rows, request = answer.chosen, answer.request
    said = messages.row_lengths(rows[0], request.lengths, request.no_lengths)
    excluded = messages.not_planned(answer.excluded.get(rows[0].job.world_size, {}))
    return [*messages.COLUMNS, said, *excluded, *dict.fromkeys(note for row in rows for note in row.prediction.notes)]


def print_answer(answer: Answer, console: Console) -> None:
    """Tables, changes, the recommendation with its reasons and its command, and what a plan cannot know."""
    request, chosen, job = answer.request, answer.chosen, answer.advice.job
    if len(request.counts) > 1:
        _show_machines(answer, console)
    console.print(Text(messages.heading(chosen, request.gpu), style="bold"))
    table.print_rows(chosen, answer.price, request.lengths, console)
    if all(row.limits for row in chosen):
        _show_limits(chosen, console)
    for line in _notes(answer):
        console.print(Text(line, style="dim"))
    for row in chosen:
        if row.fit.status != "fits" and (row.change or len(request.counts) == 1):
            change = messages.change_and_need(row.change) if row.change else "none was found"
            styled = (row.job.strategy, STATUS_STYLE[row.fit.status])
            console.print(Text.assemble(styled, f": the mildest fix: {change}"))
    for line in filter(None, map(messages.resume_too_large, chosen)):
        console.print(Text(line))
    console.print(Text(f"\nRecommended: {job.strategy if job else 'another machine'}", style="bold"))
    for line in (*messages.reasons(answer.advice), messages.rule(rule_of_thumb(chosen))):
        console.print(Text(line))
    if job:
        console.print(Text(f"\n{request.command(job)}\n"), soft_wrap=True)
    console.print(Text("What this plan cannot know:", style="dim"))
    for line in messages.CANNOT_KNOW:
        console.print(Text(f"  {line}", style="dim"))


def _show_limits(rows: Sequence[Row], console: Console) -> None:
    named = [Column("Strategy", lambda row: row.job.strategy)]
    others = [
        Column("Largest\nmicro batch", lambda row: f"{row.limits.micro_batch_size:,}"),
        Column("Longest\nsequences", lambda row: f"{row.limits.max_length:,}"),
    ]
    print_columns(named, others, rows, console)


def _show_machines(answer: Answer, console: Console) -> None:
    """One line a number of GPUs, one column a strategy."""
    request, rows = answer.request, answer.rows
    console.print(Text(f"Which machine runs {request.recipe.path}?", style="bold"))
    found = {(row.job.world_size, request.named(row.job)): row for row in rows}

    def cell(line: dict, name: str) -> str:
        row = found.get((line["count"], name))
        return "-" if row is None else row.fit.status

    named = [Column("GPUs", lambda line: str(line["count"]))]
    others = [Column(name, partial(cell, name=name)) for name in request.strategies]
    print_columns(named, others, [{"count": count} for count in request.counts], console)
    for count, why in answer.refused.items():
        console.print(Text(f"{count}: {why}", style="dim"))
    for offload, name in ((True, "Smallest machine"), (False, "Without offload")):
        count = fewest_gpus(rows, offload)
        named_gpus = "no number of these GPUs" if count is None else f"{count} x {request.gpu.name}"
        console.print(Text(f"{name}: {named_gpus}"))
    console.print()
