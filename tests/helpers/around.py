"""Calls of a run that a test watches, or something done before them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def before(owner: Any, name: str, act: Callable) -> Iterator[None]:
    """Within it each call of `owner.name` is `act` with the same arguments first."""
    original = getattr(owner, name)

    def call(*arguments, **keywords):
        act(*arguments, **keywords)
        return original(*arguments, **keywords)

    with mock.patch.object(owner, name, call):
        yield
