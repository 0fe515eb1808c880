"""From what a run recorded to the numbers that the report shows: one plain dict per run."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zero_recipes.metrics.parts import ModelStateBytes
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.metrics.schema import ORDER
from zero_recipes.theory import zero_paper

BYTES_PER_VALUE = {"bf16": 2, "fp16": 2, "fp32": 4}
FINAL_STEPS = 5
NONE = (None, None, None)  # a rank that failed before anything was measured


def comparison(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The rows of the sweep: folder and strategy have the same name."""
    return [run for run in runs if run.compared]


def single_runs(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Everything else, such as a full training run beside the sweep; no run of a sweep of values."""
    return [run for run in runs if not run.compared and run.swept is None]


def baseline(runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """What the others are measured against: ddp, or zero0 where ddp is missing or did not finish."""
    finished = {run.strategy: run for run in comparison(runs) if run.status == "ok"}
    return finished.get("ddp") or finished.get("zero0")


def largest_rank(run: MeasuredRun) -> ModelStateBytes | None:
    """The rank that holds most model state on the device that trains."""
    ranks = [rank for rank in run.model_state_bytes or [] if rank and (rank.params, rank.grads, rank.optimizer) != NONE]
    return max(ranks, key=state_total) if ranks else None


def state_total(rank: ModelStateBytes) -> int:
    """Bytes of params, grads and optimizer on the device that trains; what is offloaded does not count."""
    return (rank.params or 0) + (rank.grads or 0) + (rank.optimizer or 0)


def textbook(run: MeasuredRun) -> zero_paper.ModelState | None:
    """The formula's bytes for this run, or None where no formula covers it (offload, ZeRO++, unknown size)."""
    strategy = run.strategy.removesuffix("_bf16_states")
    if strategy not in (*ORDER, "fsdp2") or not run.parameters or not run.world_size or run.precision is None:
        return None
    trainable = run.trainable_parameters
    if run.strategy == "ddp":
        # Under autocast DDP keeps weights, gradients and Adam in fp32, whatever the run's precision.
        return zero_paper.model_state_bytes_fp32(run.parameters, run.world_size, 0, trainable)
    if run.strategy == "fsdp2":
        # Its fp32 shards are their own master: stage 3's formula, with fp32's bytes.
        return zero_paper.model_state_bytes_fp32(run.parameters, run.world_size, 3, trainable)
    sizes = (run.parameters, run.world_size, ORDER.index(strategy) - 1, trainable)
    if run.precision == "fp32":
        return zero_paper.model_state_bytes_fp32(*sizes)
    return zero_paper.model_state_bytes(*sizes, 12 if strategy == run.strategy else 6)


def peak_allocated(run: MeasuredRun) -> int | None:
    """Bytes allocated on the accelerator at the peak of the fullest rank; None without an accelerator."""
    return max((rank.allocated for rank in run.peak_memory_bytes or [] if rank and rank.allocated), default=None)


def planned_states(run: MeasuredRun) -> int | None:
    """Bytes of the planned model states on the device that trains; None for a run that was not planned."""
    planned = run.predicted.model_state_bytes if run.predicted else None
    parts = [planned.params, planned.grads, planned.optimizer] if planned else [None]
    return None if None in parts else sum(parts)


def planned_peak(run: MeasuredRun) -> int | None:
    """Bytes allocated at the planned peak; None where no accelerator can be held against it."""
    return run.predicted.peak_memory_bytes if run.predicted and run.device != "cpu" else None


def peak_resident(run: MeasuredRun) -> int | None:
    """Bytes of the largest process."""
    return max((rank.rss for rank in run.peak_memory_bytes or [] if rank and rank.rss), default=None)


def speed(run: MeasuredRun) -> float | None:
    """Non-padding tokens per second over all ranks."""
    return run.tokens_per_second.non_padding if run.tokens_per_second else None


def share_of_tokens(run: MeasuredRun, kind: str) -> float | None:
    """Of all tokens of the run, padding included, those that are "non_padding" or "supervised"."""
    count = getattr(run.tokens, kind) if run.tokens else None
    return count / run.tokens.all if count is not None and run.tokens.all else None


def communication_volume(run: MeasuredRun) -> int | None:
    """Bytes per optimizer step as the paper counts them: all-reduce twice, others once."""
    if run.communication_bytes_per_step is None:
        return None
    return zero_paper.paper_volume(run.communication_bytes_per_step)


def communication_in_phi(run: MeasuredRun) -> float | None:
    """The same in units of Φ, the bytes of the trainable parameters in the run's precision."""
    return in_phi(run, run.communication_bytes_per_step)


def in_phi(run: MeasuredRun, sent: Mapping[str, int] | None) -> float | None:
    """Bytes by collective, as the paper counts them, in units of Φ."""
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


def final_loss(run: MeasuredRun) -> float | None:
    """Mean of the last five steps; one step alone is mostly noise."""
    last = (run.loss_history or [])[-FINAL_STEPS:]
    return sum(last) / len(last) if last else None


def table_rows(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """One dict per run: sizes in bytes, times in seconds, None for what is not known."""
    reference = baseline(runs)
    return [_row(run, reference) for run in runs]


def _row(run: MeasuredRun, reference: MeasuredRun | None) -> dict[str, Any]:
    rank, expected = largest_rank(run), textbook(run)
    total = state_total(rank) if rank else None
    code, reason = why_ended(run)
    return {
        "folder": run.folder.name,
        "label": run.label,
        "strategy": run.strategy,
        "compared": run.compared,
        "status": run.status,
        "error": run.error if run.status == "unreadable" else None,
        "device": run.device,
        "world_size": run.world_size,
        "precision": run.precision,
        "model": run.model,
        "parameters": run.parameters,
        "state_bytes": total,
        "params_bytes": rank.params if rank else None,
        "grads_bytes": rank.grads if rank else None,
        "optimizer_bytes": rank.optimizer if rank else None,
        "host_bytes": rank.offloaded_host if rank else None,
        "disk_bytes": rank.offloaded_disk if rank else None,
        "textbook_bytes": expected.total if expected else None,
        "state_over_textbook": total / expected.total if total is not None and expected else None,
        "planned_state_bytes": planned_states(run),
        "peak_allocated_bytes": peak_allocated(run),
        "planned_peak_bytes": planned_peak(run),
        "resident_bytes": peak_resident(run),
        "tokens_per_second": speed(run),
        "relative_speed": relative_speed(run, reference),
        "mfu": run.mfu,
        "non_padding_share": share_of_tokens(run, "non_padding"),
        "supervised_share": share_of_tokens(run, "supervised"),
        "step_seconds_median": run.step_seconds.median if run.step_seconds else None,
        "communication_bytes": communication_volume(run),
        "communication_in_phi": communication_in_phi(run),
        "between_nodes_in_phi": in_phi(run, run.communication_bytes_between_nodes),
        "paper_in_phi": paper_in_phi(run),
        "steps": len(run.loss_history or []),
        "final_loss": final_loss(run),
        "swept": run.swept,
        "code": code,
        "reason": reason,
    }


def why_ended(run: MeasuredRun) -> tuple[str | None, str | None]:
    """(code, reason in one line) of a run that did not end well; a code only where it was refused."""
    if run.status == "ok" or not run.error:
        return None, None
    what = run.error.removeprefix("refused: ").partition(" why: ")[0].strip()
    code = re.search(r" \[(ZR\d{3})\]", what)
    if code is None:
        return None, what.split("\n")[0]
    return code[1], what.replace(code[0], "")


def relative_speed(run: MeasuredRun, reference: MeasuredRun | None) -> float | None:
    """Tokens per second as a share of the baseline's; None for runs outside the comparison."""
    if reference is None or not run.compared:
        return None
    own, base = speed(run), speed(reference)
    return own / base if own is not None and base else None


def setting(runs: Sequence[MeasuredRun]) -> str:
    """Model, machine and precision in one line; CPU runs say that they are no GPU."""
    known = [run for run in runs if run.model and run.device and run.world_size] or list(runs)
    first = known[0]
    model = (first.model or "unknown model").removeprefix("./")
    processes = f"{first.world_size or '?'} x {first.device or 'unknown device'}"
    if first.device == "cpu":
        processes = f"{first.world_size} CPU processes, no GPU"
    return ", ".join(part for part in (model, processes, first.precision) if part)
