"""The versions that the tests run on: the ranges of pyproject.toml."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


@cache  # each look parses the package's whole description
def installed(library: str) -> str:
    """Its version; nothing is imported. Raises PackageNotFoundError."""
    return metadata.version(library)


@cache
def tested() -> dict[str, SpecifierSet]:
    """{library: its range} of the libraries that have an upper bound, for private parts of them are used."""
    required = map(Requirement, metadata.requires("zero-recipes") or ())
    return {each.name: each.specifier for each in required if any(s.operator == "<" for s in each.specifier)}


def is_tested(library: str) -> bool:
    """Whether the installed version lies in the range. A local version (2.13.0+cpu) is its public one."""
    return installed(library) in tested()[library]
