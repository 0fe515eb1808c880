"""Where a run's seconds go: each moment since its process was started belongs to one of six phases, the innermost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from zero_recipes.core.process import age

PHASES = ("startup", "data", "model", "train", "eval", "save")


class PhaseClock:
    """Seconds per phase: `seconds` has all of PHASES, and they sum up to the age of the process when `book` is called.

    A phase inside another (evaluation inside training) is taken out of the outer one; outside of all it is "startup".
    `before`: seconds that have passed already.
    """

    def __init__(self, before: float = 0.0) -> None:
        self.failed: str | None = None  # the innermost phase that an error has left
        self._had_a_run = False
        self._start(time.perf_counter() - before)

    def _start(self, at: float) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = at
        self._stack = [PHASES[0]]

    @property
    def current(self) -> str:
        return self._stack[-1]

    def begin_run(self) -> None:
        """In a process that has had a run the clock begins anew."""
        if self._had_a_run:
            self._start(time.perf_counter())
        self._had_a_run, self.failed = True, None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`name`: of PHASES."""
        self.book()
        self._stack.append(name)
        try:
            yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self.book()
            self._stack.pop()

    def switch(self, name: str) -> None:
        """From now on the innermost phase is another."""
        self.book()
        self._stack[-1] = name

    def book(self) -> None:
        """Count up to this moment."""
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._mark
        self._mark = now


CLOCK = PhaseClock(age())  # of this process
