"""Output of libraries that tells a user nothing (tables.yaml: each entry's source, and why it may go)."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from zero_recipes.core.files import package_yaml
from zero_recipes.core.process import imported_for_good, rank

BAR_SECONDS = "10"  # between two states of a bar without a terminal; what is faster shows none
DROPPED = package_yaml(__package__, "tables.yaml")["dropped"]


def quieten() -> None:
    """Drop such output, and progress bars that nobody looks at.

    Bars move only on a terminal, on the first rank.
    Without one each machine's first process shows how far datasets is, every 10 s.
    """
    quieten_loggers()
    for module, message in DROPPED["future_warnings"].items():
        warnings.filterwarnings("ignore", message=message, category=FutureWarning, module=module)
    if rank() or not sys.stderr.isatty():
        import transformers

        transformers.utils.logging.disable_progress_bar()
    if int(os.environ.get("LOCAL_RANK", rank())):
        import datasets

        datasets.disable_progress_bars()


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Model libraries that are imported inside, for good (core/process.py), are quiet from then on."""
    quieten_loggers()
    with imported_for_good():
        yield
    quieten()


def quieten_loggers() -> None:
    """What must be done before the libraries are imported."""
    if not sys.stderr.isatty():  # tqdm reads its defaults when it is imported
        os.environ.setdefault("TQDM_DELAY", BAR_SECONDS)
        os.environ.setdefault("TQDM_MININTERVAL", BAR_SECONDS)
    for name, level in DROPPED["below"].items():
        logging.getLogger(name).setLevel(level)
    for name, words in DROPPED["lines"].items():
        logging.getLogger(name).addFilter(lambda line, words=words: words not in str(line.msg))
