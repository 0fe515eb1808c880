"""How far a run is, for people: a bar on a terminal, and a line for each log."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from zero_recipes.core import units
from zero_recipes.metrics.callback import StageMetricsCallback

BAR = "{l_bar}{bar}| step {n_fmt} of {total_fmt}{postfix}"
EVALUATION_BAR = "{l_bar}{bar}| evaluation, batch {n_fmt} of {total_fmt}"
# of a terminal that does not know its size, as `docker run -t` and `script` make one: without one tqdm draws nothing
COLUMNS = 80
ROWS = 20


class RunProgress(TrainerCallback):
    """Shows on rank 0 which step a run is at, its loss, tokens/s, peak memory, and the time that is left.

    It stands in for the Trainer's own printer and bar. All numbers are on the host already: no step waits for them.

    Args:
        metrics: measures the run; called before this one.
        has_bar: whether a bar moves on stderr. The lines of the log are printed either way.
    """

    def __init__(self, metrics: StageMetricsCallback, has_bar: bool):
        self.metrics = metrics
        self.has_bar = has_bar
        self.bar: tqdm | None = None
        self.evaluation_bar: tqdm | None = None
        self.first_step = 0  # after which the time is taken
        self.first_time: float | None = None
        self.speed = ""  # of the last log

    def on_train_begin(self, args, state, control, **kwargs):
        """Draw the bar, at the step that a resumed run goes on from."""
        self.first_step = state.global_step + 1  # it compiles and allocates: its time says nothing of the others
        self.first_time = None
        self.speed = ""
        if self.has_bar and state.is_world_process_zero:
            self.bar = _bar(state.max_steps, BAR, initial=state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar."""
        if state.global_step == self.first_step:
            self.first_time = time.monotonic()
        if self.bar is not None:
            self._describe(state)
            self.bar.update(state.global_step - self.bar.n)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Move the bar of an evaluation, below that of the training."""
        if not (self.has_bar and state.is_world_process_zero and has_length(eval_dataloader)):
            return
        if self.evaluation_bar is None:
            self.evaluation_bar = _bar(len(eval_dataloader), EVALUATION_BAR, leave=False)
        self.evaluation_bar.update()

    def on_evaluate(self, args, state, control, **kwargs):
        """Take the evaluation's bar away."""
        if self.evaluation_bar is not None:
            self.evaluation_bar.close()
        self.evaluation_bar = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print the line of a log, above the bar."""
        if not state.is_world_process_zero or not logs:
            return
        line = self.line(logs, state.global_step, state.max_steps)
        if "tokens_per_second" in logs:
            self.speed = speed(logs["tokens_per_second"])
        if self.bar is None:
            print(line, flush=True)
            return
        self.bar.write(line)
        self._describe(state)
        self.bar.refresh()

    def on_train_end(self, args, state, control, **kwargs):
        """Leave the bar where it is."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None

    def line(self, logs: Mapping[str, Any], step: int, steps: int) -> str:
        """The line of a log: the step, the loss, what people wait for, then the other numbers under their names."""
        others = dict(logs)
        parts = []
        if "loss" in others:
            parts.append(f"loss {number(others.pop('loss'))}")
        if "tokens_per_second" in others:
            parts.append(speed(others.pop("tokens_per_second")))
        if "peak_memory_bytes" in others:
            parts.append(f"peak memory {units.size(others.pop('peak_memory_bytes'))}")
        parts.append(self.time_left(step, steps))
        for name, value in others.items():
            if name == "total_flos":
                continue
            if "_bytes" in name:
                parts.append(f"{name.replace('_bytes', '')} {units.size(value)}")
            else:
                parts.append(f"{name} {number(value)}")
        return f"step {step} of {steps}: {', '.join(filter(None, parts))}"

    def time_left(self, step: int, steps: int) -> str:
        """Say how long the remaining steps take, at the pace so far, with its evaluations and saves.

        "" before the second step of this process and after the last one.
        """
        done = step - self.first_step
        if self.first_time is None or done < 1 or step >= steps:
            return ""
        pace = (time.monotonic() - self.first_time) / done
        return f"{units.duration(pace * (steps - step))} left"

    def _describe(self, state) -> None:
        """Write what stands behind the bar."""
        loss = f"loss {number(self.metrics.last_step[0])}" if self.metrics.step_losses else ""
        parts = [loss, self.speed, self.time_left(state.global_step, state.max_steps)]
        self.bar.ncols = terminal_columns()
        self.bar.set_postfix_str(", ".join(filter(None, parts)), refresh=False)


def speed(tokens_per_second: float) -> str:
    """Write a speed for people: 11,432 tokens/s."""
    return f"{units.count(tokens_per_second)} tokens/s"


def number(value: Any) -> str:
    """Write a number of a log with four significant digits; whole numbers and texts as they are."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def terminal_columns() -> int:
    """The width of the terminal that stderr is; COLUMNS where it is none, or does not know."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS


def _bar(total: int, form: str, **more: Any) -> tqdm:
    return tqdm(total=total, bar_format=form, ncols=terminal_columns(), nrows=ROWS, file=sys.stderr, delay=0, **more)
