"""Where a run's seconds go: each moment since its process was started belongs to one phase, the innermost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from zero_recipes.core.process import age

PHASES = ("imports", "checks", "kernels", "meeting", "plan", "tokenising", "model", "first_step", "steps", "logging")
PHASES += ("evaluation", "sampling", "saving", "other")
# stages that a failure is said to be of, and the phase that their seconds count to
STAGES = {"data": "tokenising", "samples_before": "sampling", "train": "first_step", "samples_after": "sampling"}
STAGES["save"] = "saving"


class PhaseClock:
    """Seconds per phase: `seconds` has all of PHASES, and they sum up to the age of the process when `book` is called.

    A phase inside another (samples inside training) is taken out of the outer one; outside of all it is "imports" until
    a run begins, and "other" from then on. `before`: seconds that have passed already.
    """

    def __init__(self, before: float = 0.0) -> None:
        self.failed: str | None = None  # the innermost stage or phase that an error has left
        self._had_a_run = False
        self._start(time.perf_counter() - before)

    def _start(self, at: float) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = at
        self._stack = [("imports", "imports")]  # (what a failure says, the phase)

    @property
    def current(self) -> str:
        return self._stack[-1][0]

    def begin_run(self) -> None:
        """The program is imported and checked. In a process that has had a run the clock begins anew."""
        if self._had_a_run:
            self._start(time.perf_counter())
        self._had_a_run, self.failed = True, None
        self.switch("other")

    @contextlib.contextmanager
    def phase(self, name: str, failing: str | None = None) -> Iterator[None]:
        """`name`: of PHASES or STAGES; `failing`: what a failure inside is said to be of, where that is another."""
        self.book()
        self._stack.append((failing or name, STAGES.get(name, name)))
        try:
            yield
        except BaseException:
            self.failed = self.failed or failing or name
            raise
        finally:
            self.book()
            self._stack.pop()

    def switch(self, phase: str) -> None:
        """From now on the innermost phase is another; a failure says the same as before."""
        self.book()
        self._stack[-1] = (self._stack[-1][0], phase)

    def book(self) -> None:
        """Count up to this moment."""
        now = time.perf_counter()
        self.seconds[self._stack[-1][1]] += now - self._mark
        self._mark = now


CLOCK = PhaseClock(age())  # of this process
