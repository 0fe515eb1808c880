"""Seconds of optimizer steps.

Seconds of forward, backward, reduction and optimizer in a step, by DeepSpeed's own timers (wall_clock_breakdown).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from zero_recipes.libs.deepspeed_engine import read_timers_before_reset

MOST_WARMUP_STEPS = 5


class StepClock:
    """Durations of optimizer steps, data loading included, what the Trainer does between steps (logs, evaluation,
    checkpoints) excluded. On CUDA by events, so that no step waits for the device."""

    def __init__(self, device: str) -> None:
        self.on_cuda = device == "cuda"
        self.start_mark = None
        self.steps: list[tuple] = []

    def open(self) -> None:
        """The next step begins here. Called again, it moves the beginning."""
        self.start_mark = self._mark()

    def close(self) -> None:
        self.steps.append((self.start_mark, self._mark()))
        self.open()

    def seconds(self, first: int = 0) -> list[float]:
        """One duration per closed step, from the `first` on."""
        if self.on_cuda:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in self.steps[first:]]
        return [end - start for start, end in self.steps[first:]]

    def _mark(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class EngineSeconds:
    """Keeps what the engine logs and resets."""

    def __init__(self, engine: Any):
        self.steps: list[dict[str, float]] = []
        read_timers_before_reset(engine, self.steps.append)

    def median(self, warmup: int) -> dict[str, float] | None:
        """{phase: seconds of one optimizer step}, the median after the warm-up steps; None where nobody asked for it.

        backward contains backward_inner (autograd) and backward_reduce (what is left to reduce after it).
        """
        timed = self.steps[warmup:]
        if not timed:
            return None
        return {name: statistics.median(step.get(name, 0.0) for step in timed) for name in timed[0]}


def steps_not_timed(total: int) -> int:
    """How many of `total` optimizer steps are not timed: the first that compiles and allocates, and the second, which
    the probe of the memory slows down; more of a longer run, at most half of it and five."""
    return min(total, max(2, min(MOST_WARMUP_STEPS, total // 2)))
