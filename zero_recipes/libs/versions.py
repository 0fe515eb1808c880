"""The versions that the tests run on: what the ranges of pyproject.toml say, and nothing beyond them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from packaging.specifiers import SpecifierSet

# Of every library whose private parts are touched, here or in planner/simulator; pyproject.toml says the same.
# DeepSpeed's patch releases bring new code, so the range holds one.
TESTED = {
    "torch": ">=2.13,<2.14",
    "deepspeed": ">=0.19.8,<0.19.9",
    "transformers": ">=5.23,<5.24",
    "trl": ">=1.16,<1.17",
    "accelerate": ">=1.15,<1.16",
    "datasets": ">=5.2,<5.3",
    "bitsandbytes": ">=0.50.2,<0.51",
}


@cache  # a check asks for the same few a hundred times, and each time the package's whole description is parsed
def installed(library: str) -> str:
    """Its version; nothing is imported. Raises PackageNotFoundError."""
    return metadata.version(library)


def is_tested(library: str) -> bool:
    """Whether the installed version lies in the range. A local version (2.13.0+cpu) is its public one."""
    return installed(library) in SpecifierSet(TESTED[library])


def floor(library: str) -> str:
    """The oldest version of the range."""
    return next(str(s.version) for s in SpecifierSet(TESTED[library]) if s.operator == ">=")


def untested(libraries: Iterable[str]) -> list[str]:
    """Those of an installed version outside of the range: "torch 2.14.0 (tested: >=2.13,<2.14)"."""
    return [f"{name} {installed(name)} (tested: {TESTED[name]})" for name in libraries if not is_tested(name)]
