"""What datasets, pyarrow, pandas, tokenizers and jinja2 raise, as a refusal with their own words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zero_recipes.core.findings import Refusal, first_line, refusal


@contextlib.contextmanager
def library_errors(code: str, **values: object) -> Iterator[None]:
    """Any exception in the block but MemoryError becomes the refusal of that code, with its root cause."""
    try:
        yield
    except (Refusal, MemoryError):
        raise
    except Exception as error:
        raise refusal(code, cause=root_cause(error), **values) from error


def root_cause(error: BaseException) -> str:
    """The message of the first error in a chain, with its type: datasets wraps what it meets."""
    seen = {id(error)}
    while (earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(earlier) in seen or type(earlier).__name__ == "RemoteTraceback":  # another process's traceback, as text
            break
        if type(error).__name__ == "DatasetGenerationCastError":  # names file and columns, its cause does not
            return " ".join(str(error).split())[:400]
        error = earlier
        seen.add(id(error))
    return f"{type(error).__name__}: {first_line(error)}"
