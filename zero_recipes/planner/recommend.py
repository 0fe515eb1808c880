"""What to do, as a decision that a reader can follow: the strategy, why, what the others would cost, the command.

The rules of thumb by parameter count, beside what this recipe really needs, and where they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zero_recipes.core.units import parameters, significant, size
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner.advice import Fix
from zero_recipes.planner.cost import estimate
from zero_recipes.planner.hardware import Gpu
from zero_recipes.planner.job import Job
from zero_recipes.planner.rows import Row
from zero_recipes.planner.verdict import judge

LARGE_HOST = 2 * 1024**4  # bytes; servers of eight GPUs are mostly rented with 1 to 2 TiB
AS_FAST = 1.05  # within it two strategies count as equally fast: the estimate is no better


@dataclass(frozen=True)
class Recommendation:
    """What to run, why, sentence by sentence, and the command; None where nothing was found that fits."""

    strategy: str | None
    reasons: list[str]
    command: str | None


def recommend(rows: Sequence[Row], gpu: Gpu, known: Mapping[str, Gpu], command: Callable[[Job], str]) -> Recommendation:
    """The fastest row that fits, and of equally fast ones that with most headroom; else the mildest fix of all rows.

    `command`: the command line for a job.
    """
    fitting = [row for row in rows if row.verdict.word == "fits"]
    on = _machine(rows[0].job, gpu)
    if fitting:
        fastest = min(row.speed.middle for row in fitting)
        equal = [row for row in fitting if row.speed.middle <= AS_FAST * fastest]
        chosen = max(equal, key=lambda row: row.verdict.margin)
        reasons = [
            f"{_names(fitting)} {'fits' if len(fitting) == 1 else 'fit'} on {on}.",
            _why(chosen, fitting, equal),
            *_offload_would_cost(chosen, fitting),
            *_nodes(chosen.job, gpu),
            *_other_gpus(chosen, gpu, known),
        ]
        return Recommendation(chosen.job.strategy, reasons, command(chosen.job))
    fixed = [row for row in rows if row.fix]
    tight = [row for row in rows if row.verdict.word == "tight"]
    reasons = [f"No strategy is sure to fit on {on} as the recipe stands."]
    if tight:
        reasons.append(f"{_names(tight)} may: only the low end of the estimate fits, so that it can end out of memory.")
    if not fixed:
        return Recommendation(None, [*reasons, "No change that was tried makes one fit."], None)
    row = min(fixed, key=lambda row: (row.fix.mildness, estimate(row.fix.job, row.fix.prediction, gpu).middle))
    fix = row.fix
    reasons += [
        f"The mildest change: {fix.words} (from {row.job.strategy}); {size(fix.verdict.margin)} are then left.",
        *_price_of(fix),
        *_nodes(fix.job, gpu),
    ]
    return Recommendation(fix.job.strategy, reasons, command(fix.job))


def host_memory(prediction: Prediction) -> str:
    """What the run keeps in the memory of one machine, in words; nothing where it keeps nothing there."""
    held = prediction["host_bytes"]["training"]
    if not held:
        return ""
    return f"{size(held)} of host memory a machine" + (", which few have" if held > LARGE_HOST else "")


def seconds(values: tuple[float, float]) -> str:
    """A range of seconds in words: 0.43 to 0.64 s."""
    return f"{significant(values[0])} to {significant(values[1])} s"


def _machine(job: Job, gpu: Gpu) -> str:
    nodes = job.world_size // job.gpus_per_node
    return f"{job.world_size} x {gpu.name}" + (f" in {nodes} machines" if nodes > 1 else "")


def _names(rows: Sequence[Row]) -> str:
    names = [row.job.strategy for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _why(chosen: Row, fitting: Sequence[Row], equal: Sequence[Row]) -> str:
    said = f"{chosen.job.strategy}: {seconds(chosen.speed.step_seconds)} a step, {size(chosen.verdict.margin)} left"
    if len(fitting) == 1:
        return f"{said}."
    if len(equal) == 1:
        return f"{said}; the fastest of them."
    return f"{said}; {_names(equal)} are equally fast by estimate, and it leaves most room."


def _offload_would_cost(chosen: Row, fitting: Sequence[Row]) -> list[str]:
    offloading = [row for row in fitting if row.speed.offloading[1] and row is not chosen]
    if chosen.speed.offloading[1]:
        return [
            f"It keeps states in {host_memory(chosen.prediction)}; that takes {seconds(chosen.speed.offloading)} of "
            "each step. More GPUs would be faster."
        ]
    if not offloading:
        return []
    row = min(offloading, key=lambda row: row.speed.middle)
    return [
        f"Offload ({row.job.strategy}) would leave {size(row.verdict.margin)}, for a step about "
        f"{significant(row.speed.middle / chosen.speed.middle)} times as long and {host_memory(row.prediction)}: for "
        "larger batches or models."
    ]


def _nodes(job: Job, gpu: Gpu) -> list[str]:
    nodes = job.world_size // job.gpus_per_node
    if nodes == 1:
        return []
    return [
        f"{nodes} machines: collectives cross the network, {significant(gpu.network_gb_s)} GB/s for each GPU where it "
        "is as the table assumes."
    ]


def _other_gpus(chosen: Row, gpu: Gpu, known: Mapping[str, Gpu]) -> list[str]:
    """The smallest GPU that would do as well: memory does not depend on the class."""
    enough = [other for other in known.values() if judge(chosen.prediction, other.memory_bytes).word == "fits"]
    least = min((other.memory_bytes for other in enough), default=gpu.memory_bytes)
    names = [other.name for other in enough if other.memory_bytes == least]
    if least >= gpu.memory_bytes or not names:
        return []
    return [f"A smaller GPU takes it too: {' or '.join(names)}."]


def _price_of(fix: Fix) -> list[str]:
    """What a fix costs, in one sentence."""
    said = {
        "checkpointing": "Recomputing activations takes about a third more computation, and changes no result.",
        "micro batch": "Smaller micro batches keep the global batch; they compute less efficiently.",
        "stage": "A higher stage changes no result; stage 3 communicates half as much again.",
        "offload": "Offload changes no result, and is much slower.",
        "LoRA": "LoRA trains another model: an adapter, with its own learning rate (ten times as high is usual).",
        "GPUs": "More GPUs cost more an hour and shorten the run.",
    }
    host = host_memory(fix.prediction)
    return [said[fix.harshest], *([f"It needs {host}."] if host else [])]


# (below so many parameters, the strategy that is commonly named for them)
RULES = ((10e9, "ddp"), (50e9, "zero2"), (float("inf"), "zero3"))


def beside(rows: Sequence[Row]) -> list[str]:
    """What the common rule says for this model, and whether it holds on these GPUs."""
    psi = rows[0].prediction["parameters"]
    name = next(strategy for limit, strategy in RULES if psi < limit)
    said = f"A common rule: {name} for a model of {parameters(psi)} parameters (ddp below 10, zero2 up to 50 billion)."
    row = next((row for row in rows if row.job.strategy == name or (name, row.job.strategy) == ("ddp", "single")), None)
    if row is None:
        return [said]
    needs = size(row.prediction["reserved_bytes"]["high"])
    if row.verdict.word == "fits":
        return [f"{said} Here it fits: {needs} at most."]
    return [
        f"{said} Here it {'may not fit' if row.verdict.word == 'tight' else 'does not fit'}: up to {needs} on a GPU of "
        f"{size(row.verdict.capacity)}. The rule leaves out the number of GPUs, their memory and the activations."
    ]
