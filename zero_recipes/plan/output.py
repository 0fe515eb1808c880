"""The plan as it is written: a table and sentences, JSON, and a folder with both and a picture."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from zero_recipes.core.files import write_json
from zero_recipes.core.tables import Column, print_columns
from zero_recipes.core.units import count, percent, significant, size
from zero_recipes.plan.choose import Change, Recommendation, Row, fewest_gpus
from zero_recipes.plan.cost import Cost, Range, cost, how_good
from zero_recipes.plan.job import Job, PlanRequest
from zero_recipes.theory.zero_paper import paper_volume

SCHEMA = 2
WIDTH = 240  # characters of a line in plan.txt
PARTS = {"params": "Params", "grads": "Grads", "optimizer": "Optimizer", "activations": "Activa-\ntions"}
PARTS |= {"buckets": "Buckets,\ngathered", "loss_head": "Loss\nhead", "other": "Other"}
NOTES = [
    "Peak: live tensors of the fullest GPU; the columns up to Other are its parts. Reserved: allocator, CUDA and NCCL "
    "included; the status is about this range. Not known: fragmentation beyond it, other programs on the GPU.",
    "Host: memory of a machine while loading / training / reading a checkpoint to go on from it. Disk: the model / a "
    "checkpoint to go on from. NVMe: swap files of a machine. Comm.: an all-reduce counts twice.",
    f"Memory is for rows of max_length. {how_good()}",
]


@dataclass(frozen=True)
class Answer:
    """Everything that was found out. `rows`: on all numbers of GPUs; those of `advice`: of the smallest machine."""

    request: PlanRequest
    rows: Sequence[Row]
    excluded: dict[int, dict[str, str]]  # {number of GPUs: {strategy: why it is not planned}}
    advice: Recommendation
    price: float | None  # of one GPU for one hour

    def cost(self, row: Row) -> Cost:
        return cost(row.job, row.speed, self.price or 1.0, self.request.lengths)


def document(answer: Answer) -> dict[str, Any]:
    """The answer as JSON can hold it: rows and changes by their fields, jobs by their place and their command."""
    request, rows, job = answer.request, answer.rows, answer.advice.job

    def plain(value: Any) -> dict[str, Any]:
        if isinstance(value, BaseModel):
            return value.model_dump()
        if not isinstance(value, Job):
            return vars(value)
        placed = {key: getattr(value, key) for key in ("model", "strategy", "world_size", "gpus_per_node")}
        return placed | {"command": request.command(value)}

    found = {
        "schema": SCHEMA,
        "recipe": str(request.recipe.path),
        "overrides": request.overrides,
        "gpu": request.gpu,
        "mean_tokens": request.lengths and request.lengths.mean,
        "rows": [vars(row) | {"cost": answer.price and answer.cost(row)} for row in rows],
        "not_planned": answer.excluded,
        "smallest_machine": fewest_gpus(rows),
        "smallest_machine_without_offload": fewest_gpus(rows, with_offload=False),
        "recommendation": job,
        "notes": [*notes(answer), *reasons(answer.advice)],
    }
    return json.loads(json.dumps(found, default=plain))


def plan_columns(answer: Answer) -> tuple[list[Column], list[Column]]:
    """(those naming the row, the others): memory first, then what is beside the GPU, time and money."""
    named = [Column("Strategy", lambda row: row.job.strategy), Column("Status", _status)]
    columns = [
        Column("Margin", lambda row: ("" if row.fit.margin < 0 else "+") + size(row.fit.margin)),
        Column("Peak", lambda row: size(row.prediction.allocated_peak_bytes)),
        Column("in", lambda row: row.prediction.peak_phase),
        *(
            Column(header, lambda row, part=part: size(row.prediction.at_peak[part] or None))
            for part, header in PARTS.items()
        ),
        Column("Reserved", lambda row: _between(tuple(dict(row.prediction.reserved_bytes).values()), size)),
        Column("Host", lambda row: _sizes(*dict(row.prediction.host_bytes).values())),
        Column("NVMe", lambda row: size(row.prediction.nvme_bytes or None)),
        Column("Disk", lambda row: _sizes(*dict(row.prediction.checkpoint_bytes).values())),
        Column("Comm.\nper step", lambda row: size(paper_volume(row.prediction.communication_bytes_per_step) or None)),
        Column("Step", lambda row: f"{_between(row.speed.step_seconds)} s"),
        Column("Tokens/s", lambda row: _between(row.speed.tokens_per_second, count)),
        Column("MFU", lambda row: _between(row.speed.mfu, percent)),
        Column("Run\nin hours", lambda row: _between(answer.cost(row).hours)),
        Column("Largest\nmicro batch", lambda row: row.limits and f"{row.limits.micro_batch_size:,}"),
        Column("Longest\nsequences", lambda row: row.limits and f"{row.limits.max_length:,}"),
    ]
    if answer.price is not None:
        columns += [
            Column("Cost of\n1M tokens", lambda row: _between(answer.cost(row).per_million_tokens)),
            Column("Cost of\nthe run", lambda row: _between(answer.cost(row).run)),
        ]
    return named, [column for column in columns if any(column.cell(row) for row in answer.advice.rows)]


def _status(row: Row) -> str:
    lacking = "host" if row.fit.host_lacks else "NVMe" if row.fit.nvme_lacks else ""
    return f"no ({lacking})" if lacking else row.fit.status


def _between(values: Range | None, written=significant) -> str:
    """A range: 0.43 - 0.64; nothing where it is not known."""
    return "" if values is None else f"{written(values[0])} - {written(values[1])}"


def _sizes(*sizes: int | None) -> str:
    return " / ".join(size(taken) if taken else "0" for taken in sizes)


def heading(answer: Answer) -> str:
    """Model, batch and machine in one line."""
    job, first = answer.advice.rows[0].job, answer.advice.rows[0].prediction
    return (
        f"{(job.model or '').removeprefix('./')}, {_machine(answer.advice)}, {first.precision}, "
        f"micro batch {first.micro_batch_size} x {first.max_length} tokens"
    )


def _machine(advice: Recommendation) -> str:
    job = advice.rows[0].job
    nodes = job.world_size // job.gpus_per_node
    return f"{job.world_size} x {advice.gpu.name}" + (f" in {nodes} machines" if nodes > 1 else "")


def notes(answer: Answer) -> list[str]:
    """What a reader needs to know of the columns and of these predictions, and what would fit in their place."""
    rows = answer.advice.rows
    excluded = answer.excluded.get(rows[0].job.world_size, {})
    found = [*NOTES, _row_lengths(answer.request, rows[0])]
    found += [f"Not planned: {name}: {why}." for name, why in excluded.items()]
    found += dict.fromkeys(note for row in rows for note in row.prediction.notes)
    for row in rows:
        if row.change:
            words = f"{change_in_words(row.change)} ({size(row.change.fit.margin)} left{_host(row.change)})"
            found.append(f"{row.job.strategy}: the change that costs least: {words}.")
        if row.fit.resume_lacks and row.fit.status != "no":
            found.append(
                f"{row.job.strategy}: the run fits, and cannot go on from a checkpoint: reading one lacks "
                f"{size(row.fit.resume_lacks)} of host memory a machine."
            )
    return found


def _row_lengths(request: PlanRequest, row: Row) -> str:
    """Which rows time and price are for."""
    lengths, longest = request.lengths, row.prediction.max_length
    if lengths is None:
        return f"Rows: lengths unknown ({request.no_lengths}); each is taken to have {longest:,} tokens."
    return f"Rows: {lengths.source}: {lengths.mean:,.0f} tokens on average, of {longest:,}; times are for them."


def change_in_words(change: Change) -> str:
    """What is set otherwise: "zero3 and activation checkpointing"."""
    start, job = change.start, change.job
    before, after = start.settings, job.settings
    parts = [job.strategy] if job.strategy != start.strategy else []
    if after.use_peft and not before.use_peft:
        parts.append("LoRA (use_peft: true)")
    if job.recomputes and not start.recomputes:
        parts.append("activation checkpointing")
    if after.per_device_train_batch_size != before.per_device_train_batch_size:
        batch, passes = after.per_device_train_batch_size, after.gradient_accumulation_steps
        parts.append(f"micro batches of {batch} with {passes} accumulations")
    return " and ".join(parts)


def reasons(advice: Recommendation) -> list[str]:
    """Why this is recommended, sentence by sentence."""
    chosen, change = advice.chosen, advice.change
    fitting = [row for row in advice.rows if row.fits and row not in advice.other_arithmetic]
    found = [f"On {_machine(advice)} fit: {_names(fitting) or 'no strategies as the recipe stands'}."]
    if advice.other_arithmetic:
        found.append(f"{_names(advice.other_arithmetic)} would fit too, with another arithmetic: other losses.")
    if chosen:
        seconds = " to ".join(map(significant, chosen.speed.step_seconds))
        why = "the fastest of them"
        if len(advice.as_fast) > 1:
            why = "it is the lowest stage of them that leaves room" if chosen.has_room else "it leaves most room"
            why = f"{_names(advice.as_fast)} are equally fast within the estimate's error; {why}"
        found.append(f"{chosen.job.strategy}: {seconds} s a step, {size(chosen.fit.margin)} left: {why}.")
    elif change:
        words = f"{change_in_words(change)} (from {change.start.strategy}{_host(change)})"
        found.append(f"The change that costs least: {words}.")
    else:
        found.append("No change that was tried makes one fit: more or larger GPUs, QLoRA or Infinity are left.")
    return found


def _host(change: Change) -> str:
    needed = change.prediction.host_bytes.training
    return f", with {size(needed)} of host memory a machine" if needed else ""


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.job.strategy for row in rows)


def print_answer(answer: Answer, console: Console) -> None:
    """The table, notes, and the recommendation with its reasons and its command."""
    request, advice = answer.request, answer.advice
    if len(request.counts) > 1:
        for words, offload in (("Smallest machine", True), ("Without offload", False)):
            count = fewest_gpus(answer.rows, offload) or "no number"
            console.print(Text(f"{words}: {count} x {request.gpu.name}"))
    console.print(Text(heading(answer), style="bold"))
    print_columns(*plan_columns(answer), advice.rows, console)
    for line in notes(answer):
        console.print(Text(line, style="dim"))
    console.print(Text(f"\nRecommended: {advice.job.strategy if advice.job else 'another machine'}", style="bold"))
    console.print(*map(Text, reasons(advice)), sep="\n")
    if advice.job:
        console.print(Text(f"\n{request.command(advice.job)}"), soft_wrap=True)


def write_answer(answer: Answer, folder: Path) -> None:
    """plan.json, plan.txt and plan.png."""
    from zero_recipes.report import plots

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", document(answer))
    with (folder / "plan.txt").open("w") as file:
        print_answer(answer, Console(file=file, width=WIDTH))
    ends = [tuple(dict(row.prediction.reserved_bytes).values()) for row in answer.advice.rows]
    rows = zip(answer.advice.rows, ends, strict=True)
    bars = [plots.Bar(row.job.strategy, row.prediction.at_peak, reserved=reserved) for row, reserved in rows]
    plots.draw_memory(bars, "Planned memory", heading(answer), folder / "plan.png", answer.request.gpu.memory_bytes)
