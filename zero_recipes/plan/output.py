"""The plan as it is written: tables for the terminal, JSON, and a folder with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from zero_recipes.core import units
from zero_recipes.core.files import write_json
from zero_recipes.core.tables import Column, markdown_columns, print_columns
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan import messages
from zero_recipes.plan.choose import Change, Recommendation, Row, fewest_gpus
from zero_recipes.plan.cost import Cost, Range, Speed, cost
from zero_recipes.plan.job import Excluded, Job, PlanRequest
from zero_recipes.report import plots
from zero_recipes.theory.zero_paper import paper_volume

SCHEMA = 1
STATUS_STYLE = {"fits": "bold green", "tight": "bold yellow", "no": "bold red"}
PARTS = {"params": "Params", "grads": "Grads", "optimizer": "Optimizer", "activations": "Activa-\ntions"}
PARTS |= {"buckets": "Buckets,\ngathered", "loss_head": "Loss\nhead", "other": "Other"}


@dataclass(frozen=True)
class Answer:
    """Everything that was found out. `chosen`: the rows of the smallest machine on which a strategy fits."""

    request: PlanRequest
    rows: Sequence[Row]
    chosen: Sequence[Row]
    refused: dict[int, str]  # {number of GPUs: why the recipe cannot run on so many}
    excluded: Excluded
    advice: Recommendation
    price: float | None  # of one GPU for one hour


# JSON


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
        "recommendation": {
            "strategy": answer.advice.job and answer.advice.job.strategy,
            "reasons": messages.reasons(answer.advice),
            "command": answer.advice.job and request.command(answer.advice.job),
        },
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
        **_speed(row.job, row.speed, answer.price),
        "real_rows": row.real and _speed(row.job, row.real, answer.price, answer.request.lengths),
        "cure": row.change and _change(row.change, answer.request),
        "max": row.limits and asdict(row.limits),
    }


def _speed(job: Job, speed: Speed, price: float | None, *lengths: Any) -> dict[str, Any]:
    """Of sequences as long as they may be, or of the rows."""
    return {
        "step_seconds": list(speed.step_seconds),
        "tokens_per_step": speed.tokens_per_step,
        "tokens_per_second": list(speed.tokens_per_second),
        "mfu": list(speed.mfu),
        "cost": None if price is None else asdict(cost(job, speed, price, *lengths)),
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


# tables


def plan_columns(answer: Answer) -> tuple[list[Column], list[Column]]:
    """(those naming the row, the others): memory first, then what is beside the GPU, time and money."""
    rows, price, lengths = answer.chosen, answer.price, answer.request.lengths
    mixed = len({row.prediction.source for row in rows}) > 1

    def costs(row: Row) -> Cost:
        return cost(row.job, row.expected, price or 1.0, lengths)

    named = [Column("Strategy", partial(_name, mixed=mixed)), Column("Status", status)]
    columns = [
        Column("Margin", lambda row: ("" if row.fit.margin < 0 else "+") + units.size(row.fit.margin)),
        Column("Peak", lambda row: units.size(row.prediction.allocated_peak_bytes)),
        Column("in", lambda row: row.prediction.peak_phase),
        *(Column(header, partial(_part, part=part)) for part, header in PARTS.items()),
        Column("Reserved", lambda row: _between(tuple(dict(row.prediction.reserved_bytes).values()), units.size)),
        Column("Host", lambda row: _sizes(*dict(row.prediction.host_bytes).values())),
        Column("NVMe a node\n/ in all", _nvme),
        Column("Disk", lambda row: _sizes(*dict(row.prediction.checkpoint_bytes).values())),
        Column("Comm.\nper step", _moved),
        Column("Step", lambda row: f"{_between(row.speed.step_seconds)} s"),
        Column("Tokens/s", lambda row: _between(row.speed.tokens_per_second, units.count)),
        Column("Step of\nthe rows", lambda row: row.real and f"{_between(row.real.step_seconds)} s"),
        Column("Real\ntokens/s", lambda row: row.real and _between(row.real.tokens_per_second, units.count)),
        Column("MFU", lambda row: _between(row.expected.mfu, units.percent)),
        Column("Run\nin hours", lambda row: _between(costs(row).hours)),
    ]
    if price is not None:
        columns += [
            Column("Cost of\n1M tokens", lambda row: _between(cost(row.job, row.speed, price).per_million_tokens)),
            Column("1M real\ntokens", lambda row: _between(lengths and costs(row).per_million_tokens)),
            Column("Cost of\nthe run", lambda row: _between(costs(row).run)),
        ]
    return named, [column for column in columns if any(column.cell(row) for row in rows)]


def status(row: Row) -> str:
    if row.fit.host_lacks or row.fit.nvme_lacks:
        return "no (host)" if row.fit.host_lacks else "no (NVMe)"
    return row.fit.status


def _between(values: Range | None, written=units.significant) -> str:
    """A range: 0.43 - 0.64; nothing where it is not known."""
    return "" if values is None else f"{written(values[0])} - {written(values[1])}"


def _name(row: Row, mixed: bool) -> str:
    return f"{row.job.strategy} *" if mixed and row.prediction.source == "formulas" else row.job.strategy


def _moved(row: Row) -> str:
    return units.size(paper_volume(row.prediction.communication_bytes_per_step) or None)


def _part(row: Row, part: str) -> str:
    return units.size(row.prediction.at_peak[part] or None)


def _nvme(row: Row) -> str:
    """Swap files of one node and of all."""
    nodes, each = row.job.world_size // row.job.gpus_per_node, row.prediction.nvme_bytes
    return _sizes(each, nodes * each) if each else ""


def _sizes(*sizes: int | None) -> str:
    return " / ".join(units.size(taken) if taken else "0" for taken in sizes)


# what is printed and written


def print_answer(answer: Answer, console: Console) -> None:
    """Tables, changes, the recommendation with its reasons and its command, and what a plan cannot know."""
    request, chosen, job = answer.request, answer.chosen, answer.advice.job
    if len(request.counts) > 1:
        _show_machines(answer, console)
    console.print(Text(messages.heading(chosen, request.gpu), style="bold"))
    print_columns(*plan_columns(answer), chosen, console)
    if all(row.limits for row in chosen):
        limits = [
            Column("Largest\nmicro batch", lambda row: f"{row.limits.micro_batch_size:,}"),
            Column("Longest\nsequences", lambda row: f"{row.limits.max_length:,}"),
        ]
        print_columns([Column("Strategy", lambda row: row.job.strategy)], limits, chosen, console)
    for line in _notes(answer):
        console.print(Text(line, style="dim"))
    for row in chosen:
        if row.fit.status != "fits" and (row.change or len(request.counts) == 1):
            change = messages.change_and_need(row.change) if row.change else "none was found"
            name = (row.job.strategy, STATUS_STYLE[row.fit.status])
            console.print(Text.assemble(name, f": the change that costs least: {change}"))
        if row.fit.resume_lacks and row.fit.status != "no":
            console.print(Text(messages.resume_too_large(row)))
    console.print(Text(f"\nRecommended: {job.strategy if job else 'another machine'}", style="bold"))
    for line in messages.reasons(answer.advice):
        console.print(Text(line))
    if job:
        console.print(Text(f"\n{request.command(job)}\n"), soft_wrap=True)
    for line in ("What this plan cannot know:", *messages.CANNOT_KNOW):
        console.print(Text(line, style="dim"))


def _notes(answer: Answer) -> list[str]:
    """What a reader needs to know of the columns and of these predictions."""
    rows, request = answer.chosen, answer.request
    lengths = messages.row_lengths(rows[0], request.lengths, request.no_lengths)
    excluded = messages.not_planned(answer.excluded.get(rows[0].job.world_size, {}))
    notes = dict.fromkeys(note for row in rows for note in row.prediction.notes)
    return [*messages.COLUMNS, lengths, *excluded, *notes]


def _show_machines(answer: Answer, console: Console) -> None:
    """One line a number of GPUs, one column a strategy."""
    request, rows = answer.request, answer.rows
    console.print(Text(f"Which machine runs {request.recipe.path}?", style="bold"))
    found = {(row.job.world_size, request.named(row.job)): row.fit.status for row in rows}
    named = [Column("GPUs", str)]
    others = [Column(name, lambda count, name=name: found.get((count, name), "-")) for name in request.strategies]
    print_columns(named, others, request.counts, console)
    for count, why in answer.refused.items():
        console.print(Text(f"{count}: {why}", style="dim"))
    for offload, name in ((True, "Smallest machine"), (False, "Without offload")):
        count = fewest_gpus(rows, offload)
        machine = "no number of these GPUs" if count is None else f"{count} x {request.gpu.name}"
        console.print(Text(f"{name}: {machine}"))
    console.print()


def write_answer(answer: Answer, folder: Path) -> None:
    """plan.json, plan.md and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", document(answer))
    chosen, heading = answer.chosen, messages.heading(answer.chosen, answer.request.gpu)
    lines = [heading, "", markdown_columns(*plan_columns(answer), chosen), *(f"- {line}" for line in _notes(answer))]
    (folder / "plan.md").write_text("\n".join(lines) + "\n")
    bars = [_bar(row.job.strategy, row.prediction) for row in chosen]
    plots.draw_memory(bars, "Planned memory", heading, folder / "plan.png", answer.request.gpu.memory_bytes)


def _bar(name: str, prediction: Prediction) -> plots.Bar:
    reserved = prediction.reserved_bytes
    return plots.Bar(name, prediction.at_peak, reserved=(reserved.low, reserved.high))
