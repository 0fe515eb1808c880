"""What to run: the rules of the choice, in order, and what they choose of a machine's rows; or the mildest change.

docs/strategies.md explains these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zero_recipes.config.ds_config import OFFLOADS
from zero_recipes.core.hardware import Gpu
from zero_recipes.plan.advice import Change
from zero_recipes.plan.cost import estimate
from zero_recipes.plan.fit import fit_of
from zero_recipes.plan.job import Job
from zero_recipes.plan.rows import Row

ROOM = 0.25  # of the GPU's memory, to be left: for larger batches and evaluations, and for what the plan does not know
# (below so many parameters, the strategy that is commonly named for them)
COMMON = ((10e9, "ddp"), (50e9, "zero2"), (float("inf"), "zero3"))


@dataclass(frozen=True)
class Rule:
    """One question about one strategy; a yes chooses it. `others`: all rows of its place that fit, itself included."""

    strategy: str
    question: str
    holds: Callable[[Row, Sequence[Row]], bool]


@dataclass(frozen=True)
class Place:
    """Where the model states lie. Its rules are asked in turn if a strategy fits there; where none holds, the strategy
    that leaves most of each GPU is chosen (of those that `leaves_most` names)."""

    question: str
    rules: tuple[Rule, ...]
    leaves_most: tuple[str, ...]


def _leaves_room(row: Row, others: Sequence[Row]) -> bool:
    return row in fastest_of(_without_plus_plus(others)) and _has_room(row)


def _is_faster(row: Row, others: Sequence[Row]) -> bool:
    exact = _without_plus_plus(others)
    parts = [other for other in others if other not in exact]
    slowest = row.expected.step_seconds[1]
    return row in fastest_of(parts) and all(slowest < other.expected.middle for other in exact)


# as fast, faster: beyond the error of the estimates
ROOMY = "Does {} leave a quarter of each GPU, as fast as any?"
FASTER = "Several nodes: is {} faster than all without ZeRO++?"

# Lower stages communicate less. Stage 2 goes before stage 1, which holds whole gradients for longer and is no faster;
# where accumulation makes stage 2 slower, it is not among the fastest. ZeRO++ is asked about once a stage below 3 is
# out of the question; hpZ first, which changes no number. FSDP2 shares out as much as stage 3.
PLACES = (
    Place(
        "Does a strategy fit the GPUs without offload?",
        (
            Rule("ddp", ROOMY.format("plain DDP"), _leaves_room),
            Rule("zero0", ROOMY.format("stage 0"), _leaves_room),
            Rule("zero2", ROOMY.format("stage 2"), _leaves_room),
            Rule("zero1", ROOMY.format("stage 1"), _leaves_room),
            Rule("zero3_hpz", FASTER.format("stage 3 with hpZ"), _is_faster),
            Rule("zero3_plus_plus", FASTER.format("ZeRO++ whole"), _is_faster),
            Rule("zero3_qwz", FASTER.format("qwZ alone"), _is_faster),
            Rule("zero3_qgz", FASTER.format("qgZ alone"), _is_faster),
            Rule("zero3", ROOMY.format("stage 3"), _leaves_room),
            Rule("fsdp2", ROOMY.format("FSDP2"), _leaves_room),
        ),
        ("ddp", "zero0", "zero2", "zero1", "zero3", "fsdp2"),
    ),
    Place(
        "Does the memory of each node hold what is offloaded?",
        (
            Rule("zero2_offload", ROOMY.format("stage 2 with offload"), _leaves_room),
            Rule("zero3_offload", ROOMY.format("stage 3 with offload"), _leaves_room),
        ),
        ("zero2_offload", "zero3_offload"),
    ),
    Place(
        "Does NVMe hold what the memory of the nodes does not?",
        (
            Rule("zero3_offload_infinity", ROOMY.format("Infinity, parameters alone on NVMe,"), _leaves_room),
            Rule("zero3_infinity", ROOMY.format("Infinity, all on NVMe,"), _leaves_room),
        ),
        ("zero3_offload_infinity", "zero3_infinity"),
    ),
)
ORDER = tuple(rule.strategy for place in PLACES for rule in place.rules)
PLUS_PLUS = tuple(rule.strategy for rule in PLACES[0].rules if rule.holds is _is_faster)


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
    other_arithmetic: Sequence[Row] = ()  # these fit too, and train otherwise: states in 16 bits, torch_autocast

    @property
    def fitting(self) -> list[Row]:
        return [row for row in self.rows if row.fit.status == "fits" and row not in self.other_arithmetic]

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
    """What the first place that holds a strategy says by its rules; else the mildest change of all rows.

    As fast: on average no slower than the slow end of the fastest row's range, for the estimate is no better than its
    range. Strategies with another arithmetic are never chosen beside others. `rows`: of one machine. `known`: all GPUs,
    to name a smaller one.
    """
    other = [row for row in rows if changes_arithmetic(row.job)]
    other = other if len(other) < len(rows) else []
    exact = [row for row in rows if row not in other]
    fitting_otherwise = [row for row in other if row.fit.status == "fits"]
    fitting = [row for row in exact if row.fit.status == "fits"]
    if not fitting:
        changed = [row for row in exact if row.change]
        mildest = min(changed, key=lambda row: _harshness(row.change, gpu), default=None)
        return Recommendation(rows, gpu, changed=mildest, other_arithmetic=fitting_otherwise)
    place, found = next((place, found) for place in PLACES if (found := _in(place, fitting)))
    chosen = _by_rules(place, found)
    alike = [row for row in found if (kind(row.job) in PLUS_PLUS) == (kind(chosen.job) in PLUS_PLUS)]
    offloading = [row for row in fitting if row.offloads and row is not chosen]
    slower = min(offloading, key=lambda row: row.expected.middle, default=None)
    smaller = _smaller_gpus(chosen, gpu, known)
    return Recommendation(rows, gpu, chosen, fastest_of(alike), slower, smaller, other_arithmetic=fitting_otherwise)


def kind(job: Job) -> str:
    """The strategy of ORDER that `job` is one of, whatever its name and its other settings."""
    zero = job.zero
    if job.ds_config is None:
        return "fsdp2" if job.is_fsdp else "ddp"
    if job.on_nvme:
        return "zero3_offload_infinity" if "cpu" in map(zero.offload_device, OFFLOADS) else "zero3_infinity"
    if zero.offloads:
        return "zero3_offload" if job.zero_stage == 3 else "zero2_offload"
    parts = [zero.hpz_partition_size != 1, zero.quantizes_weights, zero.quantizes_gradients]
    if any(parts):
        single = dict(zip(("zero3_hpz", "zero3_qwz", "zero3_qgz"), parts, strict=True))
        return "zero3_plus_plus" if sum(parts) > 1 else next(name for name, has in single.items() if has)
    return f"zero{job.zero_stage}"


def changes_arithmetic(job: Job) -> bool:
    """Whether it trains with other numbers than mixed precision does: optimizer states in 16 bits, or torch_autocast,
    which keeps fp32 weights. (ZeRO++'s quantised collectives round too: asked about by a rule of their own.)"""
    return job.zero.bf16_masters or job.zero.bf16_states or job.zero.autocast is not None


def fastest_of(rows: Sequence[Row]) -> list[Row]:
    """Those that are as fast as the fastest one, within the error of its estimate."""
    fastest = min(rows, key=lambda row: row.expected.middle, default=None)
    return [row for row in rows if row.expected.middle <= fastest.expected.step_seconds[1]]


def _in(place: Place, rows: Sequence[Row]) -> list[Row]:
    names = {rule.strategy for rule in place.rules}
    found = [row for row in rows if kind(row.job) in names]
    return sorted(found, key=lambda row: (ORDER.index(kind(row.job)), -row.fit.margin))


def _by_rules(place: Place, found: Sequence[Row]) -> Row:
    for rule in place.rules:
        for row in found:
            if kind(row.job) == rule.strategy and rule.holds(row, found):
                return row
    return max(fastest_of(_without_plus_plus(found)), key=lambda row: row.fit.margin)


def _without_plus_plus(rows: Sequence[Row]) -> list[Row]:
    """All of them where ZeRO++ is all there is: only a comparison tells whether it is worth its rounding."""
    return [row for row in rows if kind(row.job) not in PLUS_PLUS] or list(rows)


def _has_room(row: Row) -> bool:
    return row.fit.margin >= ROOM * row.fit.capacity


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
    name = next(strategy for limit, strategy in COMMON if psi < limit)
    names = (name, "single") if name == "ddp" else (name,)
    return RuleOfThumb(name, psi, next((row for row in rows if row.job.strategy in names), None))
