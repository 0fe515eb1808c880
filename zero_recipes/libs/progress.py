"""How far the datasets library is with its rows: its moving bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from tqdm.std import tqdm

from zero_recipes.libs import parts_of_trl as parts

SAY_SECONDS = 10.0  # between two lines; what takes less time says nothing


class PlainBar(tqdm):
    """A bar that prints a line every SAY_SECONDS, and where it ends if it has printed any."""

    monitor_interval = 0  # no thread of its own: workers are forked

    def __init__(self, *arguments, **keywords):
        self.said, self.shown = time.monotonic(), -1
        super().__init__(*arguments, **keywords | {"mininterval": SAY_SECONDS / 10, "disable": False})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if time.monotonic() - self.said >= SAY_SECONDS:
            self._say()
        return True

    def _say(self) -> None:
        if self.n != self.shown:
            self.said, self.shown = time.monotonic(), self.n
            what = " ".join((self.desc or "").split()).rstrip(":")
            print(f"data          {what}: {self.n:,} of {self.total or 0:,}{self.unit}", flush=True)

    def clear(self, nolock: bool = False) -> None:
        """Nothing: a printed line stays."""

    def close(self) -> None:
        if self.shown >= 0 and not self.disable:
            self._say()
        self.disable = True  # tqdm would end a bar with an empty line


@contextlib.contextmanager
def plain_progress() -> Iterator[None]:
    """Inside, the bars of datasets' map and filter are lines, where stderr is no terminal and on the first process of
    each machine. libs/warnings.py hides the moving bars there, for each of their states would be in the log."""
    if sys.stderr.isatty() or int(os.environ.get("LOCAL_RANK", 0)):
        yield
        return
    from datasets import arrow_dataset

    parts.BARS.require()
    kept, arrow_dataset.hf_tqdm = arrow_dataset.hf_tqdm, PlainBar
    try:
        yield
    finally:
        arrow_dataset.hf_tqdm = kept
