"""What to run: of the fastest strategies that fit the lowest stage with room, or the mildest change; and what the
common rule by parameters names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_recipes.core.hardware import Gpu
from zero_recipes.planner.advice import Change
from zero_recipes.planner.cost import estimate
from zero_recipes.planner.fit import fit_of
from zero_recipes.planner.job import Job
from zero_recipes.planner.rows import Row

ROOM = 0.25  # of the GPU's memory, to be left: for larger batches and evaluations, and for what the plan does not know
# Stages from low to high, None without DeepSpeed. Stage 2 goes before stage 1, which holds whole gradients for longer
# and is no faster; where accumulation makes stage 2 slower, it is not among the fastest.
STAGES = (None, 0, 2, 1, 3)
# (below so many parameters, the strategy that is commonly named for them)
RULES = ((10e9, "ddp"), (50e9, "zero2"), (float("inf"), "zero3"))


@dataclass(frozen=True)
class Recommendation:
    """What to run, and the rows that speak for it. Neither `chosen` nor `changed` where nothing was found that fits."""

    rows: Sequence[Row]
    gpu: Gpu
    chosen: Row | None = None  # fits as the recipe stands
    as_fast: Sequence[Row] = ()  # as fast as the fastest, within the estimate's own error; `chosen` is one of them
    offloading: Row | None = None  # the fastest other row that fits by offload
    smaller_gpus: Sequence[str] = ()  # the least that would take `chosen` too
    changed: Row | None = None  # where no row fits: the one with the mildest change

    @property
    def fitting(self) -> list[Row]:
        return [row for row in self.rows if row.fit.status == "fits"]

    @property
    def has_room(self) -> bool:
        """Whether `chosen` leaves ROOM."""
        return self.chosen is not None and _has_room(self.chosen)

    @property
    def change(self) -> Change | None:
        return self.changed and self.changed.change

    @property
    def job(self) -> Job | None:
        found = self.chosen or self.change
        return found and found.job


def recommend(rows: Sequence[Row], gpu: Gpu, known: Mapping[str, Gpu]) -> Recommendation:
    """Of the rows that fit and are as fast as any, the lowest stage that leaves ROOM; else the mildest change of all.

    As fast: on average no slower than the slow end of the fastest row's range, for the estimate is no better than its
    range. Where none of them leaves ROOM, the one that leaves most. `rows`: of one machine. `known`: all GPUs, to
    name a smaller one.
    """
    fitting = [row for row in rows if row.fit.status == "fits"]
    if not fitting:
        changed = [row for row in rows if row.change]
        return Recommendation(
            rows, gpu, changed=min(changed, key=lambda row: _harshness(row.change, gpu), default=None)
        )
    fastest = min(fitting, key=lambda row: row.expected.middle)
    as_fast = [row for row in fitting if row.expected.middle <= fastest.expected.step_seconds[1]]
    roomy = [row for row in as_fast if _has_room(row)]
    chosen = min(roomy, key=_simplest) if roomy else max(as_fast, key=lambda row: row.fit.margin)
    offloading = [row for row in fitting if row.offloads and row is not chosen]
    slower = min(offloading, key=lambda row: row.expected.middle, default=None)
    return Recommendation(rows, gpu, chosen, as_fast, slower, _smaller_gpus(chosen, gpu, known))


def _has_room(row: Row) -> bool:
    return row.fit.margin >= ROOM * row.fit.capacity


def _simplest(row: Row) -> tuple[bool, int, int]:
    """For min(): without offload, of the lowest stage, with the most room."""
    return row.offloads, STAGES.index(row.job.zero_stage), -row.fit.margin


def _harshness(change: Change, gpu: Gpu) -> tuple[int, float]:
    return change.mildness, estimate(change.job, change.prediction, gpu).middle


def _smaller_gpus(chosen: Row, gpu: Gpu, known: Mapping[str, Gpu]) -> list[str]:
    """The smallest GPUs that would do as well: memory does not depend on the class."""
    able = [other for other in known.values() if other.bf16 or chosen.prediction.precision != "bf16"]
    enough = [other for other in able if fit_of(chosen.prediction, other.memory_bytes).status == "fits"]
    least = min((other.memory_bytes for other in enough), default=gpu.memory_bytes)
    return [other.name for other in enough if other.memory_bytes == least < gpu.memory_bytes]


@dataclass(frozen=True)
class RuleOfThumb:
    """The strategy that is commonly named for a model of so many parameters; `row`: where it was planned."""

    strategy: str
    parameters: int
    row: Row | None


def rule_of_thumb(rows: Sequence[Row]) -> RuleOfThumb:
    psi = rows[0].prediction.parameters
    name = next(strategy for limit, strategy in RULES if psi < limit)
    names = (name, "single") if name == "ddp" else (name,)
    return RuleOfThumb(name, psi, next((row for row in rows if row.job.strategy in names), None))
