"""Replacing a library's function for the rest of the process."""

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable:
    """Decorate the function that takes the place of `owner.name`. It gets the original as its first argument.

    The last one counts: a second replacement gets the library's own function as well, not the first replacement.
    """
    current = getattr(owner, name)
    original = getattr(current, "unpatched", current)

    def put_in_place(function: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*arguments, **keywords):
            return function(original, *arguments, **keywords)

        replacement.unpatched = original
        setattr(owner, name, replacement)
        return replacement

    return put_in_place
