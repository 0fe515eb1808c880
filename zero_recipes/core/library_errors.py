"""The net for what libraries raise: one finding with the library's own message."""

import contextlib
import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from zero_recipes.core.findings import Refusal, finding, first_line, refusal, table
from zero_recipes.core.run_end import RunFailed

LONGEST_MESSAGE = 600  # characters of a library's message in a finding; --traceback shows all of it


@contextlib.contextmanager
def library_error_as_finding(doing: str, keys: Iterable[str] = ()) -> Iterator[None]:
    """Turn whatever a library raises inside into one Refusal (ZR199) with the library's message.

    A Refusal and a RunFailed pass as they are, and so does memory that is not enough.

    Args:
        doing: what is done inside, as "making the optimizer (optim: lomo)".
        keys: names of recipe keys; the finding is about the first that the message names.
    """
    try:
        yield
    except (Refusal, RunFailed):
        raise
    except Exception as error:  # libraries raise whatever they like
        message = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "out of memory" in message:
            raise
        named = next((key for key in keys if re.search(rf"\b{re.escape(key)}\b", message)), None)
        hint = next((hint for words, hint in table()["ZR199"]["hints"].items() if words in message), "")
        about = {"doing": doing, "name": type(error).__name__, "message": message[:LONGEST_MESSAGE], "hint": hint}
        trace = "".join(traceback.format_exception(error))
        # transformers, dynamic_module_utils.py
        raised_by = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        found = finding("ZR199", recipe_key=named, **about)
        not_run = "resolve_trust_remote_code" in raised_by
        raise Refusal([replace(found, trace=trace, is_of_code_not_run=not_run)]) from error


@contextlib.contextmanager
def absent_model_as_finding(name: str) -> Iterator[None]:
    """Turn what is raised inside into a Refusal (ZR444) where a model is neither here nor comes from the Hub.

    Args:
        name: a folder, or a name on the Hub.
    """
    try:
        yield
    except OSError as error:
        if os.path.exists(name):  # something in it is wrong, which the error says
            raise
        named = Path(name)
        beside = [path.name for path in named.parent.glob("*") if path.is_dir()] if named.parent.is_dir() else []
        near = difflib.get_close_matches(named.name, beside, 1)
        fix = (
            "Check the name. A path is relative to the folder above. For a gated model, accept its license on the Hub "
            "and run `hf auth login`."
        )
        if near:
            fix = f"Did you mean {named.parent / near[0]}?"
        raise refusal("ZR444", name=name, cwd=Path.cwd(), error=first_line(error), fix=fix) from error
