"""The plan as it is written: what to do and one table, the rest behind --verbose; JSON."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from zero_recipes.core.tables import Column, print_columns
from zero_recipes.core.units import count, duration, money, percent, size
from zero_recipes.core.zero_paper import paper_volume
from zero_recipes.tools.check import rehearsal_of
from zero_recipes.tools.plan.choose import Recommendation, Row, fewest_gpus
from zero_recipes.tools.plan.cost import (
    Cost,
    Range,
    Speed,
    bytes_across_machines,
    cost,
    estimate,
    how_good,
    nvme_bytes_per_second,
)
from zero_recipes.tools.plan.job import Job, PlanRequest, shares_nothing
from zero_recipes.tools.plan.predict import BY_FORMULAS, SOURCES
from zero_recipes.tools.plan.shape import shape_of

# columns of -v
PARTS = {
    "params": "Params",
    "grads": "Grads",
    "optimizer": "Optimizer",
    "activations": "Activa-\ntions",
    "buckets": "Buckets,\ngathered",
    "loss_head": "Loss\nhead",
    "other": "Other",
}
LITTLE = 50_000_000  # bytes of host memory, which are 0.0 GB
STATUSES = {"fits": "fits", "tight": "may run out", "no": "does not fit"}
# behind -v
NOTES = (
    "Peak: live tensors on the fullest GPU; the columns up to Other are its parts. GPU memory: the peak with CUDA and "
    "NCCL, which a run needs. Nvidia-smi shows what was ever reserved. Fits: the peak and the plan's error leave what "
    "training runs on cards of this size lost to fragmentation (overheads.yaml). May run out: they leave less, or more "
    "host memory is needed than such a machine usually has. Margin: free memory beside what is needed. Other programs "
    "do not count.",
    "Host: memory per machine while loading / training / resuming. Disk: the model / a resumable checkpoint. NVMe: "
    "swap files per machine. Comm.: an all-reduce counts twice.",
    "Memory is for rows of max_length.",
)


def in_seconds(seconds: float) -> str:
    """Write seconds, up to two minutes in their own unit."""
    return duration(seconds) if seconds < 120 else f"{seconds:,.0f} s"


def in_hours(hours: float) -> str:
    """Write hours in a unit that people read."""
    return duration(3600 * hours)


def in_gigabytes(number_of_bytes: float) -> str:
    """Write bytes as GB, without the unit."""
    decimals = 1 if number_of_bytes < 1e11 else 0
    return f"{number_of_bytes / 1e9:,.{decimals}f}"


@dataclass(frozen=True)
class Answer:
    """The whole plan: what was requested, planned and recommended."""

    request: PlanRequest
    rows: Sequence[Row]  # on all numbers of GPUs; those of `advice`: of the one to take
    excluded: dict[int, dict[str, str]]  # {number of GPUs: {strategy: why it is not planned}}
    machines: Sequence[Recommendation]
    advice: Recommendation  # one of them
    lighter: Mapping[str, Row]  # LoRA and QLoRA in place of the recipe's training, on the GPUs of `advice`
    better: Row | None  # what to run in place of the row that `advice` chose
    price: float | None  # of one GPU for one hour

    def cost(self, row: Row) -> Cost:
        """Compute what a row's run costs; with a price of 1 where none is known."""
        return cost(row.job, row.speed, self.price or 1.0, self.request.lengths)

    @property
    def recommended(self) -> Row:
        """The row to run: what is better, what was changed or what was chosen; any row where nothing fits."""
        change = self.advice.change
        if self.better:
            return self.better
        if change is None:
            return self.advice.chosen or self.advice.rows[0]
        speed = estimate(change.job, change.prediction, self.request.gpu, rows=self.request.lengths)
        return Row(change.job, change.prediction, change.fit, speed)

    @property
    def job(self) -> Job | None:
        """The job to run; None where nothing fits."""
        return self.advice.job and self.recommended.job


def document(answer: Answer) -> dict[str, Any]:
    """Make the plan's JSON: rows and changes by their fields, jobs by place and command."""
    request = answer.request

    def plain(value: Any) -> dict[str, Any]:
        if isinstance(value, BaseModel):
            return value.model_dump()
        if isinstance(value, Speed):
            return vars(value) | {"likely": value.likely}
        if not isinstance(value, Job):
            return vars(value)
        place = {key: getattr(value, key) for key in ("model", "strategy", "world_size", "gpus_per_node")}
        return place | {"command": request.command(value)}

    content = {
        "schema": 2,
        "recipe": str(request.recipe.path),
        "overrides": request.overrides,
        "gpu": request.gpu,
        "mean_tokens": request.lengths and request.lengths.mean,
        "rows": [vars(row) | {"cost": answer.price and answer.cost(row)} for row in answer.rows],
        "not_planned": answer.excluded,
        "smallest_machine": fewest_gpus(answer.rows),
        "lighter": answer.lighter,
        "better": answer.better,
        "bottom_line": bottom_line(answer),
        "recommendation": answer.job,
        "notes": notes(answer),
    }
    return json.loads(json.dumps(content, default=plain))


def plan_columns(answer: Answer) -> tuple[list[Column], list[Column]]:
    """Make the columns of -v: those naming the row, and the others that are not empty."""
    named = [Column("Strategy", lambda row: row.job.strategy), Column("Memory", _status)]
    columns = [
        Column("Margin", _margin),
        Column("Peak", lambda row: size(row.prediction.allocated_peak_bytes)),
        Column("in", lambda row: row.prediction.peak_phase),
        *(_part_column(part, header) for part, header in PARTS.items()),
        Column("Host", lambda row: _sizes(row.prediction.host_bytes)),
        Column("NVMe", lambda row: size(row.prediction.nvme_bytes or None)),
        Column("Disk", lambda row: _sizes(row.prediction.checkpoint_bytes)),
        Column("Comm.\nper step", lambda row: size(paper_volume(row.prediction.communication_bytes_per_step) or None)),
        Column("Tokens/s", lambda row: _between(row.speed.tokens_per_second, count)),
        Column("MFU", lambda row: _between(row.speed.mfu, percent)),
        Column("Run", lambda row: _between(answer.cost(row).hours, in_hours)),
    ]
    return named, [column for column in columns if any(map(column.cell, answer.advice.rows))]


def _status(row: Row) -> str:
    if row.fit.host_lacks:
        return "host too small"
    if row.fit.nvme_lacks:
        return "NVMe too small"
    return STATUSES[row.fit.status]


def _margin(row: Row) -> str:
    sign = "" if row.fit.margin < 0 else "+"
    return sign + size(row.fit.margin)


def _part_column(part: str, header: str) -> Column:
    return Column(header, lambda row: size(row.prediction.at_peak[part] or None))


def _sizes(parts: BaseModel) -> str:
    return " / ".join(size(taken) if taken else "0" for _, taken in parts)


def _between(values: Range | None, written: Callable[[float], str], to: str = " - ") -> str:
    """0.43 - 0.64 s: the unit once where both have it."""
    if values is None:
        return ""
    low = written(values[0])
    high = written(values[1])
    if low == high:
        return high
    number, _, unit = low.partition(" ")
    if unit and high.count(" ") == 1 and high.endswith(f" {unit}"):
        low = number
    return f"{low}{to}{high}"


def notes(answer: Answer) -> list[str]:
    """Say what must be known to read the numbers, and what was not planned."""
    rows = answer.advice.rows
    excluded = answer.excluded.get(rows[0].job.world_size, {})
    return [
        *NOTES,
        how_good(answer.recommended.job, answer.request.gpu),
        _row_lengths(answer.request, rows[0]),
        *(f"Not planned: {name}: {why}." for name, why in excluded.items()),
        *_of_predictions(rows),
        *_of_fits(rows),
        *reasons(answer.advice),
    ]


def _row_lengths(request: PlanRequest, row: Row) -> str:
    lengths = request.lengths
    longest = row.prediction.max_length
    if lengths is None:
        return f"Rows: lengths unknown ({request.no_lengths}); each row is assumed to have {longest:,} tokens."
    return f"Rows: {lengths.source}: {lengths.mean:,.0f} tokens on average, of {longest:,}; times are for these."


def _of_predictions(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(note for row in rows for note in row.prediction.notes))


def _of_fits(rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.change:
            words = f"{difference(row.job, row.change.job)} ({size(row.change.fit.margin)} left)"
            lines.append(f"{row.job.strategy}: the cheapest change that fits: {words}.")
        if row.fit.resume_lacks and row.runs:
            lacking = f"{size(row.fit.resume_lacks)} of host memory per machine"
            lines.append(f"{row.job.strategy}: the run fits but cannot resume: reading a checkpoint lacks {lacking}.")
    return lines


def difference(old: Job, new: Job) -> str:
    """Name what is set otherwise in another job: "zero3 and activation checkpointing"."""
    before = old.settings
    after = new.settings
    parts = []
    if new.strategy != old.strategy:
        parts.append(new.strategy)
    if after.load_in_4bit and not before.load_in_4bit:
        parts.append("QLoRA")
    elif after.use_peft and not before.use_peft:
        parts.append("LoRA (use_peft: true)")
    if new.recomputes and not old.recomputes:
        parts.append("activation checkpointing")
    batch = after.per_device_train_batch_size
    if batch != before.per_device_train_batch_size:
        passes = after.gradient_accumulation_steps
        accumulation = f" with {passes} accumulation steps" if passes > 1 else ""
        parts.append(f"micro batches of {batch}{accumulation}")
    return " and ".join(parts)


def reasons(advice: Recommendation) -> list[str]:
    """Say why the strategy is recommended."""
    sentences = []
    if advice.other_arithmetic:
        others = _names(advice.other_arithmetic)
        sentences.append(f"{others} would also fit, but with different arithmetic: other losses.")
    if advice.chosen:
        sentences.append(f"{advice.chosen.job.strategy} is recommended: {_why_chosen(advice)}.")
        if shares_nothing(advice.chosen.job):
            sentences.append("One GPU has nobody to share with (ZR138), but nothing else leaves room.")
    return sentences


def _why_chosen(advice: Recommendation) -> str:
    if len(advice.as_fast) < 2:
        return "it is the fastest that fits"
    why = "the lowest with room" if advice.chosen.fit.status == "fits" else "the roomiest"
    return f"it is {why} of {_names(advice.as_fast)}, equally fast within the estimate's error"


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.job.strategy for row in rows)


def bottom_line(answer: Answer) -> str:
    """Say what to run, in a sentence or two."""
    advice = answer.advice
    machine = _machine(advice)
    if advice.job is None:
        return f"Nothing fits {machine}, not even with activation checkpointing, offload or LoRA; {_way_out(answer)}."
    if advice.change:
        changed = difference(advice.change.start, advice.change.job)
        verdict = f"Nothing fits {machine} with the unchanged recipe; {changed} does"
    else:
        row = answer.recommended
        way = f" with {difference(advice.chosen.job, row.job)}" if answer.better else ""
        fits = "fits"
        if row.fit.host_beyond_usual:
            fits = "may run out of host memory on"
        elif not row.fit.is_sure:
            fits = "may run out of memory on"
        verdict = f"{advice.chosen.job.strategy}{way} {fits} {machine}{_why_machine(answer)}"
    return f"{verdict}: {', '.join(_what_it_takes(answer))}."


def _machine(advice: Recommendation) -> str:
    job = advice.rows[0].job
    machine = f"{job.model.removeprefix('./')} on {job.world_size} x {advice.gpu.name}"
    nodes = job.world_size // job.gpus_per_node
    return f"{machine} in {nodes} machines" if nodes > 1 else machine


def _way_out(answer: Answer) -> str:
    if "QLoRA" in answer.lighter and answer.lighter["QLoRA"].runs:
        return "QLoRA does (use_peft: true, load_in_4bit: true)"
    most = max(answer.request.counts)
    return f"try --gpus {2 * most},{4 * most},{8 * most}"


def _why_machine(answer: Answer) -> str:
    if len(answer.machines) == 1:
        return ""
    counts = ", ".join(str(advice.rows[0].job.world_size) for advice in answer.machines)
    return f", the cheapest a token of {counts} GPUs"


def _what_it_takes(answer: Answer) -> list[str]:
    row = answer.recommended
    spent = answer.cost(row)
    reserved = row.prediction.reserved_bytes
    parts = [
        f"{in_gigabytes(reserved.low)} of {in_gigabytes(row.fit.capacity)} GB (nvidia-smi up to {_shown(row)})",
        *_host_memory(answer, row),
        f"likely {_between(row.speed.likely, duration, ' to ')} per step",
        f"about {_rate(row)} tokens/s",
    ]
    if spent.hours:
        parts.append(f"{_between(spent.hours, in_hours, ' to ')} for the run")
    if answer.price:
        what, key = _priced(answer)
        parts.append(f"price of {what} {_between(getattr(spent, key), money, ' to ')}")
    return parts


def _shown(row: Row) -> str:
    """What nvidia-smi may show, in GB: the allocator keeps what it once reserved while the card has room."""
    return in_gigabytes(min(row.prediction.reserved_bytes.high, row.fit.capacity))


def _host_memory(answer: Answer, row: Row) -> list[str]:
    if row.prediction.host_bytes.most < LITTLE:
        return []
    needed = f"{in_gigabytes(row.prediction.host_bytes.most)} GB of host memory"
    if answer.request.host:
        return [f"{needed} of {in_gigabytes(answer.request.host)}"]
    if row.fit.host_beyond_usual:
        return [f"{needed} where {_usual(row)} are usual"]
    return [needed]


def _priced(answer: Answer) -> tuple[str, str]:
    """(what a price is for, its name in Cost). On several machines a run is not the same work."""
    if len(answer.machines) == 1 and answer.cost(answer.advice.rows[0]).run:
        return "the run", "run"
    return "1M tokens", "per_million_tokens"


class NamedRow(NamedTuple):
    """A row of the short table, under the name that it has there."""

    name: str
    row: Row


def short_rows(answer: Answer) -> list[NamedRow]:
    """The strategies of one machine, or what to run on each; the change; LoRA and QLoRA."""
    advice = answer.advice
    several = len(answer.machines) > 1

    def named(row: Row, way: str = "") -> NamedRow:
        count = f"{row.job.world_size} x " if several else ""
        return NamedRow(f"{count}{row.job.strategy}{way}", row)

    rows = advice.rows
    if several:
        rows = [machine.chosen or max(machine.rows, key=lambda row: row.fit.margin) for machine in answer.machines]
    other_ways = dict(answer.lighter)
    if advice.change:
        way = "LoRA" if advice.change.costliest == "LoRA" else "changed"
        other_ways[way] = answer.recommended
    else:
        rows = [row for row in rows if not shares_nothing(row.job) or row is advice.chosen] or rows
    table = [*map(named, rows), *(named(row, f", {way}") for way, row in other_ways.items())]
    if answer.better and answer.better not in answer.lighter.values():
        table.append(NamedRow("as proposed", answer.better))
    return table


def short_columns(answer: Answer) -> tuple[list[Column], list[Column]]:
    """Make the columns of the short table, as `plan_columns` does."""
    named = [Column("Strategy", lambda named: named.name), Column("Memory", lambda named: _status(named.row))]
    capacity = in_gigabytes(answer.request.gpu.memory_bytes)
    host = "Host\nGB"
    if answer.request.host:
        host = f"Host GB\nof {in_gigabytes(answer.request.host)}"
    memory = [Column(f"GPU memory\nGB of {capacity}", _needed), Column(host, lambda named: _host(named.row))]
    if any(row.limits for row in answer.rows):
        limits = [
            Column("Largest\nmicro batch", lambda named: _limit(named, "micro_batch_size")),
            Column("Longest\nsequences", lambda named: _limit(named, "max_length")),
        ]
        return named, memory + limits
    return named, memory + _time_columns(answer)


def _needed(named: NamedRow) -> str:
    return in_gigabytes(named.row.prediction.reserved_bytes.low)


def _host(row: Row) -> str:
    """Needed GB; beyond what is usual, with that."""
    needed = in_gigabytes(row.prediction.host_bytes.most)
    return f"{needed} > {_usual(row)}" if row.fit.host_beyond_usual else needed


def _usual(row: Row) -> str:
    return in_gigabytes(row.prediction.host_bytes.most - row.fit.host_beyond_usual)


def _limit(named: NamedRow, key: str) -> str:
    limits = named.row.limits
    return f"{getattr(limits, key):,}" if limits else ""


def _time_columns(answer: Answer) -> list[Column]:
    step = Column("Step", lambda named: _between(named.row.speed.step_seconds, in_seconds))
    if answer.price is None:
        return [step, Column("Tokens/s\nabout", lambda named: _rate(named.row))]
    what, key = _priced(answer)

    def price(named: NamedRow) -> str:
        return _between(getattr(answer.cost(named.row), key), money)

    return [step, Column(f"Price of\n{what}", price)]


def _rate(row: Row) -> str:
    speed = row.speed
    per_second = speed.tokens_per_step / speed.middle
    return count(float(f"{per_second:.3g}"))


def _assumptions(answer: Answer) -> list[str]:
    """What the recommended row stands on: how it was predicted, how it trains, and what links and disks it has."""
    row = answer.recommended
    job = row.job
    gpu = answer.request.gpu
    first = row.prediction
    parts = [
        SOURCES[first.source],
        first.precision,
        f"micro batches of {first.micro_batch_size} x {first.max_length:,} tokens",
        "activations recomputed" if job.recomputes else "activations kept",
    ]
    if job.quantizes:
        shape = shape_of(job.config, job.settings)
        kept = 2 * (shape.parameters - shape.trainable - shape.packed)
        parts.append(f"{size(kept)} of weights in 16 bits")
    across = bytes_across_machines(job, first)
    if across:
        parts.append(f"{gpu.network_gb_s:g} GB/s per GPU between machines")
        total = paper_volume(first.communication_bytes_per_step)
        share = "all" if across == total else f"{size(across)} of"
        parts.append(f"{share} {size(total)} a step go between them")
    if job.on_nvme:
        parts.append(f"NVMe of {size(nvme_bytes_per_second(gpu))}/s")
    return parts


def print_answer(answer: Answer, console: Console, verbose: bool = False, is_draft: bool = False) -> None:
    """Print what to run, its command and the table; with `verbose` also parts, phases and notes."""
    console.print(Text(bottom_line(answer), style="bold"))
    job = answer.job
    if job:
        command = answer.request.command(job)
        console.print(Text(f"\n{command}\n"), soft_wrap=True)
    named_rows = short_rows(answer)
    print_columns(*short_columns(answer), named_rows, console)
    basis = f"By {', '.join(_assumptions(answer))}"
    if verbose:
        print_columns(*plan_columns(answer), answer.advice.rows, console)
        lines = [basis, *notes(answer)]
    else:
        quality = how_good(answer.recommended.job, answer.request.gpu)
        lines = [f"{quality} {basis}. More: -v."]
        by_reason = {}
        for note in _of_predictions(row for _, row in named_rows):
            strategy, by, reason = note.partition(BY_FORMULAS)
            if by:
                by_reason.setdefault(reason, []).append(strategy)
        lines += [f"{', '.join(names)}: formulas, because {reason}" for reason, names in by_reason.items()]
    for line in lines:
        console.print(Text(line, style="dim"))
    if not is_draft and job:
        console.print(Text(f"First, with a small model: {rehearsal_of(command, job.world_size)}"), soft_wrap=True)
