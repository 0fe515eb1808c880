"""The plan as it is written: what to do and one table, the rest behind --verbose; JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from zero_recipes.core.tables import Column, print_columns
from zero_recipes.core.units import count, duration, money, percent, significant, size
from zero_recipes.core.zero_paper import paper_volume
from zero_recipes.tools.plan.choose import Change, Recommendation, Row, fewest_gpus
from zero_recipes.tools.plan.cost import Cost, Range, cost, estimate, how_good
from zero_recipes.tools.plan.job import Job, PlanRequest
from zero_recipes.tools.plan.predict import BY_FORMULAS

SCHEMA = 2
PARTS = {"params": "Params", "grads": "Grads", "optimizer": "Optimizer", "activations": "Activa-\ntions"}
PARTS |= {"buckets": "Buckets,\ngathered", "loss_head": "Loss\nhead", "other": "Other"}
SOURCES = {"engine": "the simulated engine", "formulas": "formulas"}
NOTES = [
    "Peak: live tensors on the fullest GPU; the columns up to Other are its parts. GPU memory: from the peak with CUDA "
    "and NCCL up to what nine of ten published runs stayed below. Tight: only the low end fits, and the allocator must "
    "empty its cache. Margin: free memory at the low end. Other programs on the GPU are not counted.",
    "Host: memory per machine while loading / training / resuming. Disk: the model / a resumable checkpoint. NVMe: "
    "swap files per machine. Comm.: an all-reduce counts twice.",
    "Memory is for rows of max_length.",
]
in_seconds = lambda value: duration(value) if value < 120 else f"{value:,.0f} s"  # noqa: E731
in_hours = lambda value: duration(3600 * value)  # noqa: E731
in_gigabytes = lambda value: f"{value / 1e9:,.{1 if value < 1e11 else 0}f}"  # noqa: E731


@dataclass(frozen=True)
class Answer:
    """Everything that was found out. `rows`: on all numbers of GPUs; those of `advice`: of the one to take."""

    request: PlanRequest
    rows: Sequence[Row]
    excluded: dict[int, dict[str, str]]  # {number of GPUs: {strategy: why it is not planned}}
    machines: Sequence[Recommendation]  # for each number of GPUs
    advice: Recommendation  # one of them
    lighter: Mapping[str, Row]  # LoRA and QLoRA in place of the recipe's training, on the GPUs of `advice`
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
        "lighter": answer.lighter,
        "bottom_line": bottom_line(answer),
        "recommendation": job,
        "notes": notes(answer),
    }
    return json.loads(json.dumps(found, default=plain))


def plan_columns(answer: Answer) -> tuple[list[Column], list[Column]]:
    """(those naming the row, the others): memory first, then what is beside the GPU, time and money."""
    named = [Column("Strategy", lambda row: row.job.strategy), Column("Fits", _status)]
    columns = [
        Column("Margin", lambda row: ("" if row.fit.margin < 0 else "+") + size(row.fit.margin)),
        Column("Peak", lambda row: size(row.prediction.allocated_peak_bytes)),
        Column("in", lambda row: row.prediction.peak_phase),
        *(
            Column(header, lambda row, part=part: size(row.prediction.at_peak[part] or None))
            for part, header in PARTS.items()
        ),
        Column("Host", lambda row: _sizes(*dict(row.prediction.host_bytes).values())),
        Column("NVMe", lambda row: size(row.prediction.nvme_bytes or None)),
        Column("Disk", lambda row: _sizes(*dict(row.prediction.checkpoint_bytes).values())),
        Column("Comm.\nper step", lambda row: size(paper_volume(row.prediction.communication_bytes_per_step) or None)),
        Column("Tokens/s", lambda row: _between(row.speed.tokens_per_second, count)),
        Column("MFU", lambda row: _between(row.speed.mfu, percent)),
        Column("Run", lambda row: _between(answer.cost(row).hours, in_hours)),
    ]
    return named, [column for column in columns if any(column.cell(row) for row in answer.advice.rows)]


def _status(row: Row) -> str:
    lacking = "host" if row.fit.host_lacks else "NVMe" if row.fit.nvme_lacks else ""
    return f"no: {lacking}" if lacking else "yes" if row.fit.status == "fits" else row.fit.status


def _between(values: Range | None, written=significant, to: str = " - ") -> str:
    """A range: 0.43 - 0.64 s, its unit once where both have it; nothing where it is not known."""
    if values is None:
        return ""
    low, high = map(written, values)
    number, _, unit = low.partition(" ")
    is_short = unit and high.count(" ") == 1 and high.endswith(f" {unit}")
    return high if low == high else f"{number if is_short else low}{to}{high}"


def _sizes(*sizes: int | None) -> str:
    return " / ".join(size(taken) if taken else "0" for taken in sizes)


def _model(answer: Answer) -> str:
    return (answer.advice.rows[0].job.model or "").removeprefix("./")


def _machine(advice: Recommendation) -> str:
    job = advice.rows[0].job
    nodes = job.world_size // job.gpus_per_node
    return f"{job.world_size} x {advice.gpu.name}" + (f" in {nodes} machines" if nodes > 1 else "")


def notes(answer: Answer) -> list[str]:
    """What a reader needs to know of the columns and of these predictions, and what would fit in their place."""
    rows = answer.advice.rows
    excluded = answer.excluded.get(rows[0].job.world_size, {})
    found = [*NOTES, how_good(_recommended(answer).job, answer.request.gpu), _row_lengths(answer.request, rows[0])]
    found += [f"Not planned: {name}: {why}." for name, why in excluded.items()]
    found += dict.fromkeys(note for row in rows for note in row.prediction.notes)
    for row in rows:
        if row.change:
            words = f"{change_in_words(row.change)} ({size(row.change.fit.margin)} left)"
            found.append(f"{row.job.strategy}: the cheapest change that fits: {words}.")
        if row.fit.resume_lacks and row.fit.status != "no":
            found.append(
                f"{row.job.strategy}: the run fits but cannot resume: reading a checkpoint lacks "
                f"{size(row.fit.resume_lacks)} of host memory per machine."
            )
    return found + reasons(answer.advice)


def _row_lengths(request: PlanRequest, row: Row) -> str:
    """Which rows time and price are for."""
    lengths, longest = request.lengths, row.prediction.max_length
    if lengths is None:
        return f"Rows: lengths unknown ({request.no_lengths}); each row is assumed to have {longest:,} tokens."
    return f"Rows: {lengths.source}: {lengths.mean:,.0f} tokens on average, of {longest:,}; times are for these."


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
        parts.append(f"micro batches of {batch} with {passes} accumulation steps")
    return " and ".join(parts)


def reasons(advice: Recommendation) -> list[str]:
    """Why this is recommended, sentence by sentence."""
    chosen, names = advice.chosen, lambda rows: ", ".join(row.job.strategy for row in rows)
    found = [f"{names(advice.other_arithmetic)} would also fit, but with different arithmetic: other losses."]
    if chosen:
        why = "it is the fastest that fits"
        if len(advice.as_fast) > 1:
            why = "it is the lowest with room left" if chosen.fit.status == "fits" else "it leaves the most room"
            why = f"{names(advice.as_fast)} are equally fast within the estimate's error; {why}"
        found.append(f"{chosen.job.strategy} is recommended: {why}.")
    return found if advice.other_arithmetic else found[1:]


def bottom_line(answer: Answer) -> str:
    """What to do, in one sentence."""
    advice, machine = answer.advice, f"{_model(answer)} on {_machine(answer.advice)}"
    if advice.job is None:
        count = max(answer.request.counts)
        qlora = "QLoRA" in answer.lighter and answer.lighter["QLoRA"].runs
        way = f"try --gpus {2 * count},{4 * count},{8 * count}"
        way = "QLoRA does (use_peft: true, load_in_4bit: true)" if qlora else way
        return f"Nothing fits {machine}, not even with activation checkpointing, offload or LoRA; {way}."
    row = _recommended(answer)
    line = f"{row.job.strategy} {'fits' if row.fit.status == 'fits' else 'tightly fits'} {machine}"
    if advice.change:
        line = f"Nothing fits {machine} with the unchanged recipe; {change_in_words(advice.change)} does"
    elif len(answer.machines) > 1:
        counts = ", ".join(str(found.rows[0].job.world_size) for found in answer.machines)
        line += f", the {'cheapest' if answer.price else 'fewest'} of {counts} GPUs that fits"
    seconds = _between(row.speed.step_seconds, duration, " to ")
    line += f": {size(row.fit.margin)} free on each GPU, {seconds} per step"
    spent = answer.cost(row)
    line += f", {_between(spent.hours, in_hours, ' to ')} for the run" if spent.hours else ""
    if answer.price:
        what, key = _priced(answer)
        line += f", price of {what} {_between(getattr(spent, key), money, ' to ')}"
    return f"{line}."


def _priced(answer: Answer) -> tuple[str, str]:
    """What a price is for, and Cost's name of it: on several machines the same run is not the same work."""
    whole = len(answer.machines) == 1 and answer.cost(answer.advice.rows[0]).run
    return ("the run", "run") if whole else ("1M tokens", "per_million_tokens")


def _recommended(answer: Answer) -> Row:
    change, request = answer.advice.change, answer.request
    if change is None:
        return answer.advice.chosen or answer.advice.rows[0]
    speed = estimate(change.job, change.prediction, request.gpu, rows=request.lengths)
    return Row(change.job, change.prediction, change.fit, speed)


def short_rows(answer: Answer) -> list[tuple[str, Row]]:
    """(name, row): the strategies of one machine, or what to run on each; the change; LoRA and QLoRA."""
    rows, change = answer.advice.rows, answer.advice.change
    count = f"{rows[0].job.world_size} x " if len(answer.machines) > 1 else ""
    found = [(row.job.strategy, row) for row in rows]
    if count:
        best = [advice.chosen or max(advice.rows, key=lambda row: row.fit.margin) for advice in answer.machines]
        found = [(f"{row.job.world_size} x {row.job.strategy}", row) for row in best]
    changed = {"LoRA" if change.costliest == "LoRA" else "changed": _recommended(answer)} if change else {}
    other_ways = {**answer.lighter, **changed}
    return found + [(f"{count}{row.job.strategy}, {way}", row) for way, row in other_ways.items()]


def short_columns(answer: Answer) -> tuple[list[Column], list[Column]]:
    """(those naming the row, the others) of `short_rows`: six. Memory is the range that decides."""
    request = answer.request
    named = [Column("Strategy", lambda named: named[0]), Column("Fits", lambda named: _status(named[1]))]
    columns = [
        Column(
            f"GPU memory\nGB of {in_gigabytes(request.gpu.memory_bytes)}",
            lambda named: _between(tuple(dict(named[1].prediction.reserved_bytes).values()), in_gigabytes),
        ),
        Column(
            f"Host GB\nof {in_gigabytes(request.host)}" if request.host else "Host\nGB",
            lambda named: in_gigabytes(
                max(named[1].prediction.host_bytes.load, named[1].prediction.host_bytes.training)
            ),
        ),
    ]
    if any(row.limits for row in answer.rows):
        limit = lambda named, key: f"{getattr(named[1].limits, key):,}" if named[1].limits else ""  # noqa: E731
        columns.append(Column("Largest\nmicro batch", lambda named: limit(named, "micro_batch_size")))
        columns.append(Column("Longest\nsequences", lambda named: limit(named, "max_length")))
        return named, columns
    columns.append(Column("Step", lambda named: _between(named[1].speed.step_seconds, in_seconds)))
    if answer.price is None:
        rate = lambda speed: count(float(f"{speed.tokens_per_step / speed.middle:.3g}"))  # noqa: E731
        columns.append(Column("Tokens/s\nabout", lambda named: rate(named[1].speed)))
    else:
        what, key = _priced(answer)
        paid = lambda named: _between(getattr(answer.cost(named[1]), key), money)  # noqa: E731
        columns.append(Column(f"Price of\n{what}", paid))
    return named, columns


def print_answer(answer: Answer, console: Console, verbose: bool = False) -> None:
    """What to do, its command and one table; `verbose`: all parts, notes and reasons as well."""
    console.print(Text(bottom_line(answer), style="bold"))
    if job := answer.advice.job:
        console.print(Text(f"\n{answer.request.command(job)}\n"), soft_wrap=True)
    print_columns(*short_columns(answer), short_rows(answer), console)
    first = answer.advice.rows[0].prediction
    basis = f"By {SOURCES[first.source]}, {first.precision}, micro batches of {first.micro_batch_size} x "
    basis += f"{first.max_length:,} tokens"
    lines = [how_good(_recommended(answer).job, answer.request.gpu), f"{basis}. For parts, phases and caveats, use -v."]
    all_notes = [note for _, row in short_rows(answer) for note in row.prediction.notes]
    lines += dict.fromkeys(note for note in all_notes if BY_FORMULAS in note)
    if verbose:
        print_columns(*plan_columns(answer), answer.advice.rows, console)
        lines = [basis, *notes(answer)]
    for line in lines:
        console.print(Text(line, style="dim"))
