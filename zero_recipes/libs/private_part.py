"""A private part of a library that is relied on, and the look whether it still is as it was.

The look is cheap: names, parameters and lines of the installed code; nothing is called. Code is searched by the names
in its code objects (`co_names`), so that an attribute which only __init__ sets is found without making an object.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from types import CodeType, FunctionType
from typing import Any, Protocol

from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.libs import versions


class Reliance(Protocol):
    def missing(self) -> list[str]:
        """What is not there any more, each as a few words; empty where all is as it was."""


@dataclass(frozen=True)
class Exists:
    """`where`, a module or a class ("package.module:Class"), has these attributes."""

    where: str
    names: tuple[str, ...]

    def missing(self) -> list[str]:
        owner = find_part(self.where)
        return [f"{self.where} {name}" for name in self.names if owner is None or not hasattr(owner, name)]


@dataclass(frozen=True)
class Mentions:
    """The code of a class or a function uses these names: attributes, globals and functions that it sets or calls, or
    looks for as a text (getattr). A class may have them as its own attributes and properties too."""

    where: str
    names: tuple[str, ...]

    def missing(self) -> list[str]:
        owner = find_part(self.where)
        used = {name for code in codes(owner) for name in (*code.co_names, *code.co_consts)}
        used |= set(dir(owner)) if inspect.isclass(owner) else set()
        return [f"{self.where} {name}" for name in self.names if name not in used]


@dataclass(frozen=True)
class Takes:
    """A function takes these parameters, in this order and no others."""

    where: str
    parameters: tuple[str, ...]

    def missing(self) -> list[str]:
        function = find_part(self.where)
        if function is None:
            return [self.where]
        found = ", ".join(inspect.signature(function).parameters)
        return [] if found == ", ".join(self.parameters) else [f"{self.where} takes ({found})"]


@dataclass(frozen=True)
class Line:
    """A file of an installed library holds this text: for faults that show in no name (C++, arithmetic)."""

    library: str
    file: str
    text: str

    def missing(self) -> list[str]:
        path = metadata.distribution(self.library).locate_file(self.file)
        there = path.is_file() and self.text in path.read_text()
        return [] if there else [f"{self.file}: {self.text.strip()}"]


@dataclass(frozen=True)
class PrivatePart:
    """One place that touches what a library does not promise to keep."""

    name: str
    library: str
    used_by: str  # our module
    why: str  # what it does with the private part, and what for
    otherwise: str  # what would go wrong if it were another one
    relies_on: tuple[Reliance, ...]
    upstream: str | None = None  # issue or pull request

    @property
    def tested(self) -> str:
        return versions.TESTED[self.library]

    def missing(self) -> list[str]:
        """The self-check: what the installed version lacks."""
        return [lack for reliance in self.relies_on for lack in reliance.missing()]

    def finding(self, missing: list[str]) -> Finding:
        """The refusal for what is missing."""
        return finding(
            "ZR624",
            name=self.name,
            library=self.library,
            installed=versions.installed(self.library),
            missing="; ".join(missing),
            used_by=self.used_by,
            otherwise=self.otherwise,
            tested=self.tested,
        )

    def refuse(self, missing: list[str]) -> Refusal:
        return Refusal([self.finding(missing)])

    def require(self) -> None:
        """The self-check where the part is applied. Raises Refusal."""
        missing = self.missing()
        if missing:
            raise self.refuse(missing)

    def of(self, owner: Any, name: str) -> Any:
        """An attribute that must be there, whatever its value: never a default in its place. Raises Refusal."""
        try:
            return getattr(owner, name)
        except AttributeError:
            raise self.refuse([f"{type(owner).__name__} {name}"]) from None


def find_part(where: str) -> Any:
    """The module, class or function called "package.module:Class.function"; None where there is none."""
    module, _, path = where.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
    return getattr(found, "__func__", found)  # of a class method


def codes(thing: Any) -> Iterator[CodeType]:
    """The code of a function, or of all functions of a class, with what is nested in it and what it wraps."""
    for function in functions(thing):
        yield from _nested(function.__code__)


def functions(thing: Any) -> Iterator[FunctionType]:
    """A function, or those of a class, with what they wrap: decorators keep it in their closures."""
    waiting, seen = list(vars(thing).values()) if inspect.isclass(thing) else [thing], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (staticmethod, classmethod)):
            each = each.__func__
        if isinstance(each, property):
            waiting += [each.fget, each.fset]
        if inspect.isfunction(each) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [cell.cell_contents for cell in each.__closure__ or () if not _is_empty(cell)]


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises ValueError where nothing is in it)
    except ValueError:
        return True
    return False


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
