"""From what runs recorded to the numbers and tables that the report shows. texts.yaml lists the columns."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from zero_recipes.core import units, zero_paper
from zero_recipes.core.files import package_yaml
from zero_recipes.core.tables import Column, Row
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.metrics.schema import ORDER

BYTES_PER_VALUE = {"bf16": 2, "fp16": 2, "fp32": 4}
FINAL_STEPS = 5
STATE_PARTS = {"params_bytes": "params", "grads_bytes": "grads", "optimizer_bytes": "optimizer",
               "host_bytes": "offloaded_host", "disk_bytes": "offloaded_disk"}  # fmt: skip
# keys of a row that are fields of metrics.json
COPIED = ("label", "strategy", "compared", "status", "device", "world_size", "precision", "model", "parameters", "mfu",
          "swept")  # fmt: skip


def comparison(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The runs of strategies: folder and strategy have the same name."""
    return [run for run in runs if run.compared]


def single_runs(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Everything else, such as a full training run beside the sweep; no run of a sweep of values."""
    return [run for run in runs if not run.compared and run.swept is None]


def sweeps(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """The runs of each sweep of values: those whose values were set for the same keys."""
    by_keys: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in runs:
        if run.swept is not None:
            by_keys.setdefault(tuple(run.swept), []).append(run)
    return list(by_keys.values())


def baseline(runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The run that the others are compared with: ddp, or zero0 where ddp is missing or did not finish."""
    finished = {run.strategy: run for run in comparison(runs) if run.status == "ok"}
    return finished.get("ddp") or finished.get("zero0")


def textbook(run: MeasuredRun) -> float | None:
    """The formula's bytes for this run, or None where no formula covers it (offload, ZeRO++, unknown size)."""
    strategy = run.strategy.removesuffix("_bf16_states")
    if strategy not in (*ORDER, "fsdp2") or not run.parameters or not run.world_size or run.precision is None:
        return None
    stage = 3 if strategy == "fsdp2" else max(ORDER.index(strategy) - 1, 0)
    sizes = (run.parameters, run.world_size, stage, run.trainable_parameters)
    # under autocast DDP keeps fp32 weights, gradients and Adam; FSDP2's fp32 shards are their own master
    if run.precision == "fp32" or strategy in ("ddp", "fsdp2"):
        return zero_paper.model_state_bytes(*sizes, zero_paper.FP32).total
    each = zero_paper.MIXED if strategy == run.strategy else zero_paper.MIXED._replace(optimizer=6)
    return zero_paper.model_state_bytes(*sizes, each).total


def planned_peak(run: MeasuredRun) -> int | None:
    """Bytes allocated at the planned peak; None on CPUs, which allocate nothing to compare it with."""
    return run.predicted.peak_memory_bytes if run.predicted and run.device != "cpu" else None


def relative_speed(run: MeasuredRun, reference: MeasuredRun | None) -> float | None:
    """Tokens per second as a share of the baseline's; None for runs outside the comparison."""
    if reference is None or not run.compared:
        return None
    own, base = run.speed, reference.speed
    return own / base if own is not None and base else None


def in_phi(run: MeasuredRun, sent: Mapping[str, int] | None) -> float | None:
    """Bytes by collective, as the paper counts them, in units of Φ, the trainable parameters in the run's precision."""
    if sent is None or not run.trainable_parameters or run.precision is None:
        return None
    return zero_paper.paper_volume(sent) / (run.trainable_parameters * BYTES_PER_VALUE[run.precision])


def paper_in_phi(run: MeasuredRun) -> float | None:
    """What the paper of the strategy says, in Φ: ZeRO's, or ZeRO++'s for what crosses between nodes."""
    if run.communication_bytes_per_step is None:
        return None
    if run.strategy in ORDER or run.strategy.endswith(("_offload", "_infinity")):
        return float(zero_paper.communication_units(run.zero_stage or 0)) if (run.world_size or 1) > 1 else None
    parts = zero_paper.PLUS_PLUS.get(run.strategy)
    return None if parts is None else zero_paper.plus_plus_units(**parts)


def table_rows(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """One dict per run: sizes in bytes, times in seconds, None for what is not known."""
    reference = baseline(runs)
    return [_row(run, reference) for run in runs]


def _row(run: MeasuredRun, reference: MeasuredRun | None) -> dict[str, Any]:
    rank, expected, sent = run.fullest_rank, textbook(run), run.communication_bytes_per_step
    total = rank.total if rank else None
    last = (run.loss_history or [])[-FINAL_STEPS:]  # one step alone is mostly noise
    code, reason = _why_ended(run)
    return {key: getattr(run, key) for key in COPIED} | {
        "folder": run.folder.name,
        "state_bytes": total,
        **{key: getattr(rank, part, None) for key, part in STATE_PARTS.items()},
        "textbook_bytes": expected,
        "state_over_textbook": total / expected if total is not None and expected else None,
        "planned_state_bytes": run.predicted.state_bytes if run.predicted else None,
        "peak_allocated_bytes": run.peak("allocated"),
        "planned_peak_bytes": planned_peak(run),
        "resident_bytes": run.peak("rss"),
        "tokens_per_second": run.speed,
        "relative_speed": relative_speed(run, reference),
        "non_padding_share": _share_of_tokens(run, "non_padding"),
        "supervised_share": _share_of_tokens(run, "supervised"),
        "step_seconds_median": run.step_seconds.median if run.step_seconds else None,
        "communication_bytes": None if sent is None else zero_paper.paper_volume(sent),
        "communication_in_phi": in_phi(run, sent),
        "between_nodes_in_phi": in_phi(run, run.communication_bytes_between_nodes),
        "paper_in_phi": paper_in_phi(run),
        "steps": len(run.loss_history or []),
        "final_loss": sum(last) / len(last) if last else None,
        "code": code,
        "reason": reason,
    }


def _share_of_tokens(run: MeasuredRun, kind: str) -> float | None:
    """Of all tokens of the run, padding included, those that are "non_padding" or "supervised"."""
    count = getattr(run.tokens, kind) if run.tokens else None
    return count / run.tokens.all if count is not None and run.tokens.all else None


def _why_ended(run: MeasuredRun) -> tuple[str | None, str | None]:
    """(code, reason in one line) of a run that did not end well; a code only where it was refused."""
    if run.status == "ok" or not run.error:
        return None, None
    if run.failure is None or run.failure.reason is None:
        return None, run.error.strip().split("\n")[0]
    return run.failure.code, run.failure.reason


def setting(runs: Sequence[MeasuredRun]) -> str:
    """Model, machine and precision in one line; CPU runs say that they are no GPU."""
    first = next((run for run in runs if run.model and run.device and run.world_size), runs[0])
    model = (first.model or "unknown model").removeprefix("./")
    processes = f"{first.world_size or '?'} x {first.device or 'unknown device'}"
    if first.device == "cpu":
        processes = f"{first.world_size} CPU process{'es' * (first.world_size > 1)}, no GPU"
    return ", ".join(part for part in (model, processes, first.precision) if part)


# tables

LONGEST_REASON = 72  # characters
WRITTEN: dict[str, Callable[[Any], str]] = {
    "size": units.size,
    "size_above_zero": lambda value: units.size(value or None),
    "count": units.count,
    "percent": units.percent,
    "seconds": lambda value: "" if value is None else f"{units.significant(value)} s",
    "hundredths": lambda value: units.fixed(value, 2),
    "hundredths_above_zero": lambda value: units.fixed(value or None, 2),
    "loss": lambda value: units.fixed(value, 4),
}

texts = partial(package_yaml, __package__, "texts.yaml")


class Table(NamedTuple):
    """`rows` (table_rows) under columns that name a row, and columns about memory, and about speed and loss."""

    title: str
    named: list[Column]
    memory: list[Column]
    speed: list[Column]
    rows: Sequence[Row]

    @property
    def measured(self) -> list[Column]:
        return self.memory + self.speed


def tables(runs: Sequence[MeasuredRun]) -> list[Table]:
    """Of the comparison, of single runs and of each sweep; empty ones are left out."""
    groups = {"Comparison": comparison(runs), "Single runs": single_runs(runs)}
    found = [runs_table(group, f"{title}: {setting(group)}") for title, group in groups.items() if group]
    return [*found, *map(sweep_table, sweeps(runs))]


def notes(runs: Sequence[MeasuredRun]) -> list[str]:
    """What a reader needs to know about the columns that are shown."""
    shown = {column.header for table in tables(runs) for column in table.measured}
    listed = texts()["memory"] + texts()["speed"]
    return [column["note"] for column in listed if "note" in column and column["header"] in shown]


def runs_table(runs: Sequence[MeasuredRun], title: str = "") -> Table:
    """A row a run."""
    chosen = table_rows(runs)
    named = [Column("Run", lambda row: row["label"]), Column("Status", lambda row: row["status"])]
    return Table(title, named, _columns("memory", chosen), _columns("speed", chosen), chosen)


def sweep_table(runs: Sequence[MeasuredRun]) -> Table:
    """The runs of one sweep: the values that were set, what was measured, and why what did not run did not."""
    chosen, keys = table_rows(runs), list(runs[0].swept)
    cell = lambda value: f"{value:,}" if type(value) is int else value_text(value)  # noqa: E731
    named = [Column(name, lambda row, key=key: cell(row["swept"][key])) for key, name in short_names(keys).items()]
    if len({row["strategy"] for row in chosen}) > 1:
        named.append(Column("Strategy", lambda row: row["strategy"]))
    measured = _columns("memory", chosen, texts()["swept"]) + _columns("speed", chosen, texts()["swept"])
    measured.append(Column("Status", lambda row: row["status"]))
    if any(row["reason"] for row in chosen):
        words = lambda row: " ".join(filter(None, (row["code"], row["reason"])))  # noqa: E731
        measured.append(Column("Reason", lambda row: textwrap.shorten(words(row), LONGEST_REASON, placeholder="…")))
    return Table(f"Sweep of {', '.join(keys)}: {setting(runs)}", named, measured, [], chosen)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """{key: its last part, where no other key ends alike}."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def value_text(value: Any) -> str:
    """A value that a sweep set, on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _columns(about: str, chosen: Sequence[Row], keys: Sequence[str] = ()) -> list[Column]:
    """The columns "memory" or "speed" (those of `keys`, if given) in which some row has a value. Resident memory takes
    the place of the allocated peak where there is no accelerator."""
    reference = next((row["label"] for row in chosen if row["relative_speed"] == 1), "baseline")
    hidden = {"resident_bytes"} if any(row["peak_allocated_bytes"] for row in chosen) else {"peak_allocated_bytes"}
    listed = [column for column in texts()[about] if column["key"] not in hidden]
    found = [
        Column(header.replace("baseline", reference), lambda row, key=key, shown=shown: WRITTEN[shown](row[key]))
        for header, key, shown in ((column["header"], column["key"], column["as"]) for column in listed)
        if not keys or key in keys
    ]
    return [column for column in found if any(map(column.cell, chosen))]
