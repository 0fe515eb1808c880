"""The processes that the datasets library forks to prepare rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from zero_recipes.core.process import end_with_parent

PARALLEL = "TOKENIZERS_PARALLELISM"
_depth: list[bool] = []  # not empty inside `forked_workers`


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Processes that are forked inside, by the main thread, end when this one does, however it ends: they would keep
    its connections open and other ranks waiting.

    They use one thread each. tokenizers 0.23 (utils/parallelism.rs) sees to that too, with five lines of warning from
    each worker, wherever the variable is not set and rows were tokenised before.
    """
    was_set = PARALLEL in os.environ
    if not was_set:
        os.environ[PARALLEL] = "true"
    _depth.append(was_set)
    try:
        yield
    finally:
        _depth.pop()
        if not was_set:
            os.environ.pop(PARALLEL)


def _in_worker() -> None:
    if _depth:
        end_with_parent()
        os.environ[PARALLEL] = "false"


os.register_at_fork(after_in_child=_in_worker)
