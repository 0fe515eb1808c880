"""Which keys DeepSpeed's configuration has, asked of its parser: the names that it looks up, or its models' fields.

File names are those of DeepSpeed 0.19.8, under deepspeed/.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Collection, Iterator
from typing import Any

from zero_recipes.checks.ds_config import BLOCKS
from zero_recipes.config.ds_config import quiet
from zero_recipes.core.findings import Finding, finding

ZERO = "zero_optimization"
NO_KEY = "no_such_key"


class _Listening(dict):
    """A mapping that remembers which keys it was asked for."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self):
        return self  # `name in config.keys()` asks, too


def unknown_key_findings(path: tuple[str, ...]) -> list[Finding]:
    """At most one finding: DeepSpeed has no such key. `path`: from the top of the configuration to the key.

    A block that DeepSpeed does not look into while it parses (an optimizer's params) may hold any name here: the
    checks of the whole configuration know those.
    """
    for depth, name in enumerate(path):
        above = path[:depth]
        known = _names_in(above)
        if known and name not in known:
            near = _near(name, known) or (_near(name, _names_in((ZERO,))) if not above else [])
            dotted = [".".join((*(above or ((ZERO,) if n not in known else ())), n)) for n in near]
            return [
                finding(
                    "ZR356",
                    path=".".join(path),
                    name=name,
                    why="in " + ".".join(above) if above else "at the top",
                    fix=f"Did you mean {' or '.join(dotted)}?" if dotted else "Check its spelling.",
                )
            ]
    return []


def ds_key_names() -> set[str]:
    """The names at the top of a configuration."""
    return set(_names_in(()))


def _near(name: str, known: Collection[str]) -> list[str]:
    return [name] if name in known else difflib.get_close_matches(name, sorted(known), 2, 0.6)


@functools.cache
def _names_in(path: tuple[str, ...]) -> frozenset[str]:
    """The names that a block takes; none where DeepSpeed takes any, or the path leads to no block."""
    from deepspeed.runtime.config import DeepSpeedConfig

    top = _Listening({"train_batch_size": 1, ZERO: {}})
    if not path:
        with quiet():
            DeepSpeedConfig(top)
        return frozenset(top.asked | BLOCKS)
    block = _Listening({NO_KEY: 0, "type": "named"})  # without a type it does not look for its params
    top[path[0]] = block
    error: Exception | None = None
    with quiet():
        try:
            DeepSpeedConfig(top)
        except Exception as raised:  # a block that has been removed, or no block at all: said by ds_parser.py
            error = raised
    cls = _model_of(error)
    if cls is not None:
        return frozenset(_fields_at(cls, path[1:]))
    return frozenset(block.asked) if len(path) == 1 else frozenset()


def _model_of(error: Exception | None) -> type | None:
    """DeepSpeed's model of the block that stopped on NO_KEY."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    if not isinstance(error, ValidationError) or all(fault["loc"] != (NO_KEY,) for fault in error.errors()):
        return None
    return next((cls for cls in _below(DeepSpeedConfigModel) if cls.__name__ == error.title), None)


def _below(cls: type) -> Iterator[type]:
    for below in cls.__subclasses__():
        yield below
        yield from _below(below)


def _fields_at(cls: type, path: tuple[str, ...]) -> set[str]:
    """Names and aliases of a model's fields, or of the model that a field holds."""
    named = {alias: field for name, field in cls.model_fields.items() for alias in (name, field.alias) if alias}
    if not path:
        return set(named)
    hint = named[path[0]].annotation if path[0] in named else None
    models = [part for part in (hint, *typing.get_args(hint)) if hasattr(part, "model_fields")]
    return _fields_at(models[0], path[1:]) if models else set()
