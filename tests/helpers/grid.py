"""Cases of a test that run under `make grid` alone: repetitions of what the others of the same test show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def grid(*values: Any) -> Any:
    """A test's parameters of such a case."""
    return pytest.param(*values, marks=pytest.mark.grid)


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, of which the first `count` are in every run of the tests."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [case if len(case) > 1 else case[0] for case in several[:count]] + [grid(*case) for case in several[count:]]
