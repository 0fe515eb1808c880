"""From what a run recorded to the numbers that the report shows: one plain dict per run."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.metrics.schema import ORDER, ModelStateBytes
from zero_recipes.theory import zero_paper

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


def largest_rank(run: MeasuredRun) -> ModelStateBytes | None:
    """The rank that holds most model state on the device that trains; None where none was measured."""
    ranks = [rank for rank in run.model_state_bytes or [] if rank]
    measured = [rank for rank in ranks if {rank.params, rank.grads, rank.optimizer} != {None}]
    return max(measured, key=state_total, default=None)


def state_total(rank: ModelStateBytes) -> int:
    """Bytes of params, grads and optimizer on the device that trains; what is offloaded does not count."""
    return (rank.params or 0) + (rank.grads or 0) + (rank.optimizer or 0)


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


def peak_allocated(run: MeasuredRun) -> int | None:
    """Bytes allocated on the accelerator at the peak of the fullest rank; None without an accelerator."""
    return max((rank.allocated for rank in run.peak_memory_bytes or [] if rank and rank.allocated), default=None)


def planned_states(run: MeasuredRun) -> int | None:
    """Bytes of the planned model states on the device that trains; None for a run that was not planned."""
    planned = run.predicted.model_state_bytes if run.predicted else None
    parts = [planned.params, planned.grads, planned.optimizer] if planned else [None]
    return None if None in parts else sum(parts)


def planned_peak(run: MeasuredRun) -> int | None:
    """Bytes allocated at the planned peak; None on CPUs, which allocate nothing to compare it with."""
    return run.predicted.peak_memory_bytes if run.predicted and run.device != "cpu" else None


def speed(run: MeasuredRun) -> float | None:
    """Non-padding tokens per second over all ranks."""
    return run.tokens_per_second.non_padding if run.tokens_per_second else None


def relative_speed(run: MeasuredRun, reference: MeasuredRun | None) -> float | None:
    """Tokens per second as a share of the baseline's; None for runs outside the comparison."""
    if reference is None or not run.compared:
        return None
    own, base = speed(run), speed(reference)
    return own / base if own is not None and base else None


def losses_by_step(run: MeasuredRun) -> dict[int, float]:
    """{optimizer step: loss}. A resumed run whose checkpoint carried no history begins at `first_step`."""
    return dict(enumerate(run.loss_history or [], run.first_step))


def in_phi(run: MeasuredRun, sent: Mapping[str, int] | None) -> float | None:
    """Bytes by collective, as the paper counts them, in units of Φ, the trainable parameters in the run's precision."""
    if sent is None or not run.trainable_parameters or run.precision is None:
        return None
    return zero_paper.paper_volume(sent) / (run.trainable_parameters * BYTES_PER_VALUE[run.precision])


def communication_in_phi(run: MeasuredRun) -> float | None:
    """The bytes of one optimizer step in Φ."""
    return in_phi(run, run.communication_bytes_per_step)


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
    rank, expected, sent = largest_rank(run), textbook(run), run.communication_bytes_per_step
    total = state_total(rank) if rank else None
    last = (run.loss_history or [])[-FINAL_STEPS:]  # one step alone is mostly noise
    code, reason = _why_ended(run)
    return {key: getattr(run, key) for key in COPIED} | {
        "folder": run.folder.name,
        "error": run.error if run.status == "unreadable" else None,
        "state_bytes": total,
        **{key: getattr(rank, part, None) for key, part in STATE_PARTS.items()},
        "textbook_bytes": expected,
        "state_over_textbook": total / expected if total is not None and expected else None,
        "planned_state_bytes": planned_states(run),
        "peak_allocated_bytes": peak_allocated(run),
        "planned_peak_bytes": planned_peak(run),
        "resident_bytes": max((rank.rss for rank in run.peak_memory_bytes or [] if rank and rank.rss), default=None),
        "tokens_per_second": speed(run),
        "relative_speed": relative_speed(run, reference),
        "non_padding_share": _share_of_tokens(run, "non_padding"),
        "supervised_share": _share_of_tokens(run, "supervised"),
        "step_seconds_median": run.step_seconds.median if run.step_seconds else None,
        "communication_bytes": None if sent is None else zero_paper.paper_volume(sent),
        "communication_in_phi": communication_in_phi(run),
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
    what = run.error.removeprefix("refused: ").partition(" why: ")[0].strip()
    code = re.search(r" \[(ZR\d{3})\]", what)
    return (None, what.split("\n")[0]) if code is None else (code[1], what.replace(code[0], ""))


def setting(runs: Sequence[MeasuredRun]) -> str:
    """Model, machine and precision in one line; CPU runs say that they are no GPU."""
    first = next((run for run in runs if run.model and run.device and run.world_size), runs[0])
    model = (first.model or "unknown model").removeprefix("./")
    processes = f"{first.world_size or '?'} x {first.device or 'unknown device'}"
    if first.device == "cpu":
        processes = f"{first.world_size} CPU processes, no GPU"
    return ", ".join(part for part in (model, processes, first.precision) if part)
