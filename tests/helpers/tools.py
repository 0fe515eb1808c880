"""Small tools: calls of a run that are watched or left out, refusals that are caught, files that are damaged."""

import contextlib
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

from zero_recipes.core.findings import Refusal


@contextlib.contextmanager
def before(owner: Any, name: str, act: Callable) -> Iterator[None]:
    """Within it each call of `owner.name` is `act` with the same arguments first."""
    original = getattr(owner, name)

    def call(*arguments, **keywords):
        act(*arguments, **keywords)
        return original(*arguments, **keywords)

    with mock.patch.object(owner, name, call):
        yield


def without(name: str | None) -> contextlib.AbstractContextManager:
    """Within it the function of this dotted name does nothing."""
    return mock.patch(name, lambda *_, **__: contextlib.nullcontext()) if name else contextlib.nullcontext()


@contextlib.contextmanager
def without_rules(*codes: str) -> Iterator[None]:
    """Without the conditions of those codes; of none: without any rule."""
    from zero_recipes.checks import deepspeed_rules, preflight, rules

    with contextlib.ExitStack() as off:
        if codes:
            for rule_set in (rules.recipe_rules, deepspeed_rules.strategy_rules):
                others = {code: holds for code, holds in rule_set.conditions.items() if code not in codes}
                off.enter_context(mock.patch.object(rule_set, "conditions", others))
        else:
            rules_of_all = (preflight.rule_findings, preflight.deepspeed_findings)
            others = tuple(check for check in preflight.OF_ITS_STRATEGY if check not in rules_of_all)
            off.enter_context(mock.patch.object(preflight, "OF_ITS_STRATEGY", others))
        yield


def refusal_of(work: Callable, *arguments, **keywords) -> Refusal | None:
    try:
        work(*arguments, **keywords)
    except Refusal as refusal:
        return refusal
    return None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def zero(path: Path, draw: random.Random) -> None:
    """A block of zeros, as a file system leaves it that lost a write."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    length = min(draw.choice([1, 64, 512, 4096]), len(data) - start)
    data[start : start + length] = bytes(length) if any(data[start : start + length]) else b"\1" * length
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def lose(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = (flip, zero, cut, lose)


class Planted:
    """Unpickling it runs a command, which creates a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def plant(path: Path, mark: Path, kind: str) -> None:
    """Let the pickle at `path` hold what it held, and a command; `kind`: of the file's format."""
    held: Any = torch.load(path, weights_only=False) if path.is_file() else {}
    held = {**held, "planted": Planted(mark)} if isinstance(held, dict) else [held, Planted(mark)]
    if kind == "numpy":  # a class that may be read, with one inside that may not
        torch.save({**held, "planted": numpy.array([Planted(mark)], dtype=object)}, path)
    elif kind == "legacy":
        torch.save(held, path, _use_new_zipfile_serialization=False)
    elif kind.startswith("zip"):
        torch.save(held, path, pickle_protocol=int(kind[-1]))
    else:
        path.write_bytes(pickle.dumps(held["planted"], protocol=int(kind[-1])))
