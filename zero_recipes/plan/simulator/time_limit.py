"""How long simulations may take, and their end before it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from zero_recipes.core.process import kill_with_children


class TimeLimit:
    """Seconds that the simulations of one program may take together; then the one that runs is killed."""

    def __init__(self, seconds: float):
        self.seconds = self._left = seconds
        self.over = False
        self._worker: psutil.Process | None = None

    @contextmanager
    def of(self, worker: subprocess.Popen) -> Iterator[None]:
        """The worker simulates inside; it is killed with its children where the time is over before."""
        timer, started = threading.Timer(self._left, self.end), time.monotonic()
        timer.daemon = True
        self._worker = psutil.Process(worker.pid)
        timer.start()
        try:
            if self.over:  # from another thread, before there was a worker to kill
                self.end()
            yield
        finally:
            timer.cancel()
            self._worker = None
            self._left = max(0.0, self._left - (time.monotonic() - started))

    def end(self) -> None:
        """Kill what runs, from any thread; nothing is simulated any more."""
        self.over = True
        worker = self._worker
        if worker is not None:
            kill_with_children(worker)
