"""The report's numbers, from what runs recorded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero_recipes.core import zero_paper
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.metrics.schema import ORDER, ModelStateBytes, PredictedMetrics, Tokens

BYTES_PER_VALUE = {"bf16": 2, "fp16": 2, "fp32": 4}
FINAL_STEPS = 5  # one step alone is mostly noise
# ZeRO's stage of the strategies that the textbook covers
STAGES = {"ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}

PLAN = "plan.json"  # beside the runs: what `zero-recipes plan RECIPE --gpus N --json` has printed

Runs = Sequence[MeasuredRun]


class Planned(NamedTuple):
    """What a plan of the same job on GPUs recommends."""

    strategy: str
    in_words: str  # on which GPUs, how much memory and time


def planned(folder: Path) -> Planned | None:
    """The recommendation of the plan beside the runs; None where there is none, or it recommends nothing."""
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return Planned(plan["recommendation"]["strategy"], plan["bottom_line"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def comparison(runs: Runs) -> list[MeasuredRun]:
    """The runs of strategies: folder and strategy have the same name."""
    return [run for run in runs if run.compared]


def single_runs(runs: Runs) -> list[MeasuredRun]:
    """Other runs, without those of a sweep of values."""
    return [run for run in runs if not run.compared and run.swept is None]


def sweeps(runs: Runs) -> list[list[MeasuredRun]]:
    """The sweeps of values: for each the runs that set the same keys."""
    by_keys: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in runs:
        if run.swept is not None:
            by_keys.setdefault(tuple(run.swept), []).append(run)
    return list(by_keys.values())


def baseline(runs: Runs) -> MeasuredRun | None:
    """The run that others are compared with: ddp, or zero0 if ddp is missing or did not finish."""
    finished = {run.strategy: run for run in comparison(runs) if run.status == "ok"}
    return finished.get("ddp") or finished.get("zero0")


def textbook(run: MeasuredRun) -> float | None:
    """Model states in bytes by ZeRO's paper, or None if no formula covers them (offload, ZeRO++, unknown size)."""
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
    """Make a row of the tables for each run: sizes in bytes, times in seconds, None for what is not known."""
    reference = baseline(runs)
    return [_row(run, reference) for run in runs]


def _row(run: MeasuredRun, reference: MeasuredRun | None) -> dict[str, Any]:
    states = run.fullest_rank or ModelStateBytes()
    state_bytes = run.fullest_rank and states.total
    expected = textbook(run)
    predicted = run.predicted or PredictedMetrics()
    tokens = run.tokens or Tokens()
    sent = run.communication_bytes_per_step
    losses = run.loss_history or []
    last = losses[-FINAL_STEPS:]
    code, reason = _why_ended(run)
    return {
        "label": run.label,
        "strategy": run.strategy,
        "compared": run.compared,
        "status": run.status,
        "device": run.device,
        "world_size": run.world_size,
        "precision": run.precision,
        "model": run.model,
        "parameters": run.parameters,
        "mfu": run.mfu,
        "swept": run.swept,
        "folder": run.folder.name,
        "state_bytes": state_bytes,
        "params_bytes": states.params,
        "grads_bytes": states.grads,
        "optimizer_bytes": states.optimizer,
        "host_bytes": states.offloaded_host,
        "disk_bytes": states.offloaded_disk,
        "textbook_bytes": expected,
        "state_over_textbook": _ratio(state_bytes, expected),
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
    """Name model, machine and precision in one line."""
    first = next((run for run in runs if run.model and run.device and run.world_size), runs[0])
    model = (first.model or "unknown model").removeprefix("./")
    count = first.world_size or "?"
    machine = f"{count} x {first.device or 'unknown device'}"
    if first.device == "cpu":
        machine = f"{count} CPU process{'' if count == 1 else 'es'}, no GPU"
    known = f"{model}, {machine}"
    return f"{known}, {first.precision}" if first.precision else known


def value_text(value: Any) -> str:
    """Write a value that a sweep set on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
