"""What tiny runs would work out again and again, kept for the rest of a process: a sixth of such a run."""

import functools
import re
from importlib import metadata

from fsspec import spec


def remember() -> None:
    """Installed packages' metadata, which each question for a version parses anew, and compiled patterns.

    A package folder that a test makes has a path of its own. Of patterns Python keeps 512, and transformers' and
    datasets' are more than that; of each folder of rows datasets asks for some sixty names, several times a run.
    """
    parse = metadata.PathDistribution.metadata.fget
    parsed = functools.cache(lambda path: parse(metadata.PathDistribution(path)))
    metadata.PathDistribution.metadata = property(lambda self: parsed(self._path))
    spec.glob_translate = functools.cache(spec.glob_translate)
    re._MAXCACHE = 2**14
