"""Seconds of forward, backward, reduction and optimizer in a step, by DeepSpeed's own timers (wall_clock_breakdown)."""

from __future__ import annotations

import statistics
from typing import Any

# DeepSpeed 0.19.8, deepspeed/utils/timer.py: timers that run over all micro steps of one optimizer step
PHASES = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward_inner",
    "bwd_allreduce": "backward_reduce",
    "step": "optimizer",
}


class EngineSeconds:
    """Keeps what the engine logs and resets.

    Outside of `engine.timers.log` the timers read 0 (deepspeed/runtime/engine.py, step: log and reset in one), so the
    reading is done inside it.
    """

    def __init__(self, engine: Any):
        self.steps: list[dict[str, float]] = []
        self.is_on = bool(getattr(engine, "wall_clock_breakdown", lambda: False)())
        if self.is_on:
            self._read_before_reset(engine.timers)

    def _read_before_reset(self, timers: Any) -> None:
        log = timers.log

        def read_and_log(names, **keywords):
            seconds = {PHASES[n]: timers(n).elapsed(reset=False) / 1000 for n in names if n in PHASES}
            if seconds:
                self.steps.append(seconds)
            log(names, **keywords)

        timers.log = read_and_log

    def median(self, warmup: int) -> dict[str, float] | None:
        """{phase: seconds of one optimizer step}, the median after the warm-up steps; None where nobody asked for it.

        backward contains backward_inner (autograd) and backward_reduce (what is left to reduce after it).
        """
        timed = self.steps[warmup:]
        if not timed:
            return None
        return {name: statistics.median(step.get(name, 0.0) for step in timed) for name in timed[0]}
