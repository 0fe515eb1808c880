"""Cases of a test that run under `make grid` alone: repetitions of what the others of the same test show."""

from typing import Any

import pytest


def grid(*values: Any) -> Any:
    """A test's parameters of such a case."""
    return pytest.param(*values, marks=pytest.mark.grid)
