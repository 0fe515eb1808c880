"""Drawn cases: a few in every run of the tests, all of them under `make grid`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test: the first `count` as they are, the others marked for the grid."""
    return [case if n < count else _in_the_grid(case) for n, case in enumerate(cases)]


def _in_the_grid(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.grid)
