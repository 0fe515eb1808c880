"""Installed packages' metadata, read once: each question for a version parses the whole file again, a tenth of a tiny run."""

from __future__ import annotations

import functools
from importlib import metadata


def remember_metadata() -> None:
    """For the rest of this process; a folder that a test makes is asked for itself."""
    parse = metadata.PathDistribution.metadata.fget
    parsed = functools.cache(lambda path: parse(metadata.PathDistribution(path)))
    metadata.PathDistribution.metadata = property(lambda self: parsed(self._path))
