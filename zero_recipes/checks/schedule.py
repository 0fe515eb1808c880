"""How many steps a run takes, and what its learning rate does in them, by the libraries' own schedules."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks.filled import HIDDEN_SIZE, fill_auto, warmup_of
from zero_recipes.config.ds_config import quiet
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings, steps_by_epochs
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.units import counted
from zero_recipes.data.audit import Audit
from zero_recipes.model.positions import position_findings

CODES = ("ZR174", "ZR217", "ZR868")  # what is found in a schedule
NEAR_PEAK = 0.95  # of learning_rate: DeepSpeed's WarmupCosineLR comes near it and never there
AT_PEAK = 1 - 1e-6  # of the highest: above it the learning rate is there
LEAST_AFTER = 0.1  # of all steps, from the first at the peak on: with fewer the run is over before it has begun
MOST_IDLE = 1  # steps at 0 after the peak
MOST_LOOKED_AT = 100_000  # steps; of longer runs every second, third, ...
# schedules of DeepSpeed that have one peak; OneCycle and LRRangeTest move as they please
WITH_PEAK = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

Rate = Callable[[int], float]  # the learning rate of a step, the first is 0, as a share of the peak


@dataclass(frozen=True)
class Schedule:
    """The learning rates of a whole run."""

    name: str
    steps: int
    warmup: int  # steps before the first at the peak; all of them where none is
    idle: int  # steps at 0 after the peak

    @property
    def is_too_late(self) -> bool:
        """Whether the peak is never reached, or in the last steps."""
        return self.steps - self.warmup < LEAST_AFTER * self.steps


def schedule_of(settings: Settings, strategy: Strategy, steps: int) -> Schedule | None:
    """The learning rates of a run of so many steps, by the library that makes its schedule.

    None where the loss decides, where there is no peak, and where the library refuses: its own objects are made
    elsewhere (checks/trl_objects.py), and what they raise is a finding.
    """
    block = strategy.ds.raw.get("scheduler")
    name = f"lr_scheduler_type {getattr(settings.lr_scheduler_type, 'value', settings.lr_scheduler_type)}"
    rate = None
    with contextlib.suppress(Exception), quiet():
        if block is None:
            rate = _rate_by_transformers(settings, steps)
        else:
            name = str(block["type"])
            rate = _rate_by_deepspeed(settings, strategy, steps)
        if rate is not None:
            return _looked_at(name, rate, steps)
    return None


def _looked_at(name: str, rate: Rate, steps: int) -> Schedule:
    stride = math.ceil(steps / MOST_LOOKED_AT)
    shares = [rate(step) for step in range(0, steps, stride)]
    highest = max(shares)
    if highest < NEAR_PEAK:
        return Schedule(name, steps, warmup=steps, idle=0)
    first = next(number for number, share in enumerate(shares) if share >= AT_PEAK * highest)
    idle = shares[first:].count(0)
    return Schedule(name, steps, warmup=first * stride, idle=idle * stride)


def _rate_by_transformers(settings: Settings, steps: int) -> Rate | None:
    import torch
    from transformers import get_scheduler

    schedule = get_scheduler(
        settings.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate),
        num_warmup_steps=warmup_of(settings, steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(settings.lr_scheduler_kwargs or {}),
    )
    if not hasattr(schedule, "lr_lambdas"):  # by the loss
        return None
    return schedule.lr_lambdas[0]


def _rate_by_deepspeed(settings: Settings, strategy: Strategy, steps: int) -> Rate | None:
    import torch
    from deepspeed.runtime import lr_schedules

    block = scheduler_in_force(settings, strategy, steps)
    if block["type"] not in WITH_PEAK:
        return None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    schedule = getattr(lr_schedules, block["type"])(optimizer, **(block.get("params") or {}))
    (peak,) = schedule.org_lrs if block["type"] == "WarmupCosineLR" else schedule.max_lrs

    def rate(step: int) -> float:
        schedule.last_batch_iteration = step - 1  # it begins at -1, and the engine moves it on after each step
        return float(schedule.get_lr()[0]) / peak

    return rate


def scheduler_in_force(settings: Settings, strategy: Strategy, steps: int) -> Mapping[str, Any]:
    """The ds_config's scheduler block, each "auto" filled in."""
    filled, arguments = fill_auto(strategy.ds.raw, settings, strategy.world_size)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN_SIZE))  # for other keys
    with contextlib.suppress(ValueError):  # what contradicts the run has its finding
        filled.trainer_config_finalize(arguments, model, steps)
    return filled.config["scheduler"]


def schedule_findings(settings: Settings, strategy: Strategy, steps: int) -> Iterator[Finding]:
    """A schedule whose peak comes too late or never, or that ends in steps at 0: the run costs, and hardly trains."""
    schedule = schedule_of(settings, strategy, steps)
    if schedule is None:
        return
    if schedule.is_too_late:
        when = "never reaches its peak"
        if schedule.warmup < steps:
            when = f"reaches its peak in step {schedule.warmup + 1:,}"
        block = strategy.ds.raw.get("scheduler")
        if block is None:
            about = {"name": schedule.name, "warmup": warmup_of(settings, steps)}
            yield finding("ZR174", **about, steps=counted(steps, "step"), when=when)
        else:
            parameters = scheduler_in_force(settings, strategy, steps).get("params") or {}
            about = {"source": strategy.source, "warmup": parameters.get("warmup_num_steps", "unset")}
            yield finding("ZR217", **about, steps=counted(steps, "step"), when=when)
    elif schedule.idle > MOST_IDLE:
        yield finding("ZR868", idle=schedule.idle, steps=steps)


def length_findings(run: Run, audit: Audit, sequences: int | None) -> Iterator[Finding]:
    """What is wrong once the rows are known: the schedule of a run by epochs, and rows longer than the positions.

    `sequences`: training rows or packs; None for a stream, of which the audit has seen the beginning.
    """
    if run.meta is not None:
        yield from position_findings(run.meta, audit.longest_sequence)
    steps = steps_of(run.settings, run.strategy, sequences)
    if steps is not None and run.settings.max_steps <= 0:
        yield from schedule_findings(run.settings, run.strategy, steps)


def steps_of(settings: Settings, strategy: Strategy, sequences: int | None) -> int | None:
    """Optimizer steps of the whole run. `sequences`: training rows or packs; None where they are not known."""
    if settings.max_steps > 0:
        return settings.max_steps
    if sequences is None or not 0 < settings.num_train_epochs < math.inf:
        return None
    return steps_by_epochs(sequences, settings, strategy.replicas)


def length_described(
    settings: Settings, strategy: Strategy, rows: int | None = None, sequences: int | None = None
) -> str:
    """The line "steps" about a run: rows, packs, steps, epochs and warm-up, as far as they are known.

    `rows`: those trained on; `sequences`: the same, or packs of them.
    """
    parts = []
    if rows is not None:
        parts.append(counted(rows, "row"))
    elif settings.streams:
        parts.append("a stream of rows")
    if settings.packing and sequences is not None:
        parts.append(counted(sequences, "pack"))
    steps = steps_of(settings, strategy, sequences)
    if steps is None:
        parts.append(f"{counted(settings.num_train_epochs, 'epoch')} (check --data counts the steps)")
    else:
        parts.append(f"{counted(steps, 'step')}{_epochs(settings, strategy, steps, sequences)}")
        parts[-1] += _warmup_described(schedule_of(settings, strategy, steps))
    return f"{'steps':<14}{', '.join(parts)}"


def _epochs(settings: Settings, strategy: Strategy, steps: int, sequences: int | None) -> str:
    if sequences is None:
        return ""
    epochs = settings.num_train_epochs
    if settings.max_steps > 0:
        epochs = steps / steps_by_epochs(sequences, settings.replace(num_train_epochs=1), strategy.replicas)
    return f" in {counted(epochs, 'epoch')}"


def _warmup_described(schedule: Schedule | None) -> str:
    if schedule is None:
        return ""
    warmup = f"{schedule.warmup:,}" if schedule.warmup else "none"
    return f" ({warmup} of them warm-up)"
