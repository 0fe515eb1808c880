"""The report's numbers and tables. texts.yaml lists the columns."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from zero_recipes.core import units, zero_paper
from zero_recipes.core.files import package_yaml
from zero_recipes.core.tables import Column, Row
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.metrics.schema import ORDER, PredictedMetrics, Tokens

BYTES_PER_VALUE = {"bf16": 2, "fp16": 2, "fp32": 4}
FINAL_STEPS = 5  # one step alone is mostly noise
# ZeRO's stage of the strategies that the textbook covers
STAGES = {"ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}

Runs = Sequence[MeasuredRun]


def comparison(runs: Runs) -> list[MeasuredRun]:
    """The runs of strategies: folder and strategy have the same name."""
    return [run for run in runs if run.compared]


def single_runs(runs: Runs) -> list[MeasuredRun]:
    """Other runs, without those of a sweep of values."""
    return [run for run in runs if not run.compared and run.swept is None]


def sweeps(runs: Runs) -> list[list[MeasuredRun]]:
    """Of values: runs that set the same keys."""
    by_keys: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in runs:
        if run.swept is not None:
            by_keys.setdefault(tuple(run.swept), []).append(run)
    return list(by_keys.values())


def baseline(runs: Runs) -> MeasuredRun | None:
    """ddp, or zero0 if ddp is missing or did not finish."""
    finished = {run.strategy: run for run in comparison(runs) if run.status == "ok"}
    return finished.get("ddp") or finished.get("zero0")


def textbook(run: MeasuredRun) -> float | None:
    """The formula's bytes, or None if no formula covers it (offload, ZeRO++, unknown size)."""
    strategy = run.strategy.removesuffix("_bf16_states")
    if strategy not in STAGES or not run.parameters or not run.world_size or run.precision is None:
        return None
    bytes_per_parameter = zero_paper.MIXED
    if run.precision == "fp32" or run.strategy in ("ddp", "fsdp2"):
        # under autocast DDP keeps fp32 weights, gradients and Adam; FSDP2's fp32 shards are their own master
        bytes_per_parameter = zero_paper.FP32
    elif strategy != run.strategy:
        bytes_per_parameter = zero_paper.MIXED._replace(optimizer=6)
    sizes = (run.parameters, run.world_size, STAGES[strategy], run.trainable_parameters)
    return zero_paper.model_state_bytes(*sizes, bytes_per_parameter).total


def _ratio(part: float | None, whole: float | None) -> float | None:
    """None if one is unknown or the whole is 0."""
    if part is None or not whole:
        return None
    return part / whole


def _volume_in_phi(run: MeasuredRun, sent: Mapping[str, int] | None) -> float | None:
    """`sent`: bytes by collective. Φ: the trainable parameters in the run's precision."""
    if sent is None or not run.trainable_parameters or run.precision is None:
        return None
    phi = run.trainable_parameters * BYTES_PER_VALUE[run.precision]
    return zero_paper.paper_volume(sent) / phi


def _paper_in_phi(run: MeasuredRun) -> float | None:
    """By ZeRO's paper, or ZeRO++'s for what crosses between nodes."""
    if run.communication_bytes_per_step is None:
        return None
    if run.strategy in zero_paper.PLUS_PLUS:
        return zero_paper.plus_plus_units(zero_paper.PLUS_PLUS[run.strategy])
    is_zero = run.strategy in ORDER or run.strategy.endswith(("_offload", "_infinity"))
    if not is_zero or (run.world_size or 1) == 1:
        return None
    return float(zero_paper.communication_units(run.zero_stage or 0))


def table_rows(runs: Runs) -> list[dict[str, Any]]:
    """One dict per run: sizes in bytes, times in seconds, None for what is not known."""
    reference = baseline(runs)
    return [_row(run, reference) for run in runs]


def _row(run: MeasuredRun, reference: MeasuredRun | None) -> dict[str, Any]:
    row = {key: getattr(run, key) for key in texts()["of_run"]}
    row["folder"] = run.folder.name
    for key, part in texts()["of_states"].items():
        row[key] = getattr(run.fullest_rank, part, None)
    expected = textbook(run)
    predicted = run.predicted or PredictedMetrics()
    tokens = run.tokens or Tokens()
    sent = run.communication_bytes_per_step
    losses = run.loss_history or []
    last = losses[-FINAL_STEPS:]
    code, reason = _why_ended(run)
    return row | {
        "textbook_bytes": expected,
        "state_over_textbook": _ratio(row["state_bytes"], expected),
        "planned_state_bytes": predicted.state_bytes,
        "peak_allocated_bytes": run.peak("allocated"),
        # CPUs allocate nothing to compare it with
        "planned_peak_bytes": None if run.device == "cpu" else predicted.peak_memory_bytes,
        "resident_bytes": run.peak("rss"),
        "tokens_per_second": run.speed,
        "relative_speed": _ratio(run.speed, reference.speed) if reference and run.compared else None,
        "non_padding_share": _ratio(tokens.non_padding, tokens.all),
        "supervised_share": _ratio(tokens.supervised, tokens.all),
        "step_seconds_median": run.step_seconds.median if run.step_seconds else None,
        "communication_bytes": None if sent is None else zero_paper.paper_volume(sent),
        "communication_in_phi": _volume_in_phi(run, sent),
        "between_nodes_in_phi": _volume_in_phi(run, run.communication_bytes_between_nodes),
        "paper_in_phi": _paper_in_phi(run),
        "steps": len(losses),
        "final_loss": _ratio(sum(last), len(last)),
        "code": code,
        "reason": reason,
    }


def _why_ended(run: MeasuredRun) -> tuple[str | None, str | None]:
    """(code, reason in one line); a code only if it was refused."""
    if run.status == "ok":
        return None, None
    if run.failure and run.failure.reason:
        return run.failure.code, run.failure.reason
    return None, (run.error or "").strip().partition("\n")[0] or None


def setting(runs: Runs) -> str:
    """Model, machine and precision in one line."""
    first = next((run for run in runs if run.model and run.device and run.world_size), runs[0])
    model = (first.model or "unknown model").removeprefix("./")
    count = first.world_size or "?"
    machine = f"{count} x {first.device or 'unknown device'}"
    if first.device == "cpu":
        machine = f"{count} CPU process{'' if count == 1 else 'es'}, no GPU"
    known = f"{model}, {machine}"
    return f"{known}, {first.precision}" if first.precision else known


# tables

LONGEST_REASON = 72  # characters


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{units.significant(value)} s"


WRITTEN = {
    "size": units.size,
    "size_above_zero": lambda value: units.size(value or None),
    "count": units.count,
    "percent": units.percent,
    "seconds": _seconds,
    "hundredths": lambda value: units.fixed(value, 2),
    "hundredths_above_zero": lambda value: units.fixed(value or None, 2),
    "loss": lambda value: units.fixed(value, 4),
}

texts = partial(package_yaml, __package__, "texts.yaml")


class Table(NamedTuple):
    """`rows` (table_rows) under columns that name them, and those about memory, and speed and loss."""

    title: str
    named: list[Column]
    memory: list[Column]
    speed: list[Column]
    rows: Sequence[Row]

    @property
    def measured(self) -> list[Column]:
        return self.memory + self.speed


def tables(runs: Runs) -> list[Table]:
    """Empty ones are left out."""
    found = []
    groups = {"Comparison": comparison(runs), "Single runs": single_runs(runs)}
    for title, group in groups.items():
        if group:
            found.append(runs_table(group, f"{title}: {setting(group)}"))
    for group in sweeps(runs):
        found.append(sweep_table(group))
    return found


def notes(runs: Runs) -> list[str]:
    """On the columns that are shown."""
    shown = set()
    for table in tables(runs):
        shown.update(column.header for column in table.measured)
    columns = texts()["memory"] + texts()["speed"]
    return [column["note"] for column in columns if "note" in column and column["header"] in shown]


def runs_table(runs: Runs, title: str = "") -> Table:
    rows = table_rows(runs)
    named = [Column("Run", itemgetter("label")), Column("Status", itemgetter("status"))]
    return Table(title, named, _columns("memory", rows), _columns("speed", rows), rows)


def sweep_table(runs: Runs) -> Table:
    """The runs of one sweep: values, measurements, and why a run failed."""
    rows = table_rows(runs)
    keys = list(runs[0].swept)
    named = [Column(key, partial(_swept_cell, key)) for key in keys]
    if len({row["strategy"] for row in rows}) > 1:
        named.append(Column("Strategy", itemgetter("strategy")))
    shown = texts()["swept"]
    measured = _columns("memory", rows, shown) + _columns("speed", rows, shown)
    measured.append(Column("Status", itemgetter("status")))
    if any(row["reason"] for row in rows):
        measured.append(Column("Reason", _reason_cell))
    return Table(f"Sweep of {', '.join(keys)}: {setting(runs)}", named, measured, [], rows)


def _swept_cell(key: str, row: Row) -> str:
    value = row["swept"][key]
    return f"{value:,}" if type(value) is int else value_text(value)


def _reason_cell(row: Row) -> str:
    reason = f"{row['code'] or ''} {row['reason'] or ''}"
    return textwrap.shorten(reason, LONGEST_REASON, placeholder="…")


def value_text(value: Any) -> str:
    """A value that a sweep set, on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _columns(about: str, rows: Sequence[Row], keys: Sequence[str] = ()) -> list[Column]:
    """Columns of texts.yaml (those of `keys`, if given) in which some row has a value.

    Without an accelerator, resident memory replaces the allocated peak.
    """
    has_accelerator = any(row["peak_allocated_bytes"] for row in rows)
    hidden = "resident_bytes" if has_accelerator else "peak_allocated_bytes"
    reference = next((row["label"] for row in rows if row["relative_speed"] == 1), "baseline")
    found = []
    for text in texts()[about]:
        key = text["key"]
        if key == hidden or (keys and key not in keys):
            continue
        header = text["header"].replace("baseline", reference)
        column = Column(header, partial(_cell, key, WRITTEN[text["as"]]))
        if any(map(column.cell, rows)):
            found.append(column)
    return found


def _cell(key: str, written: Any, row: Row) -> str:
    return written(row[key])
