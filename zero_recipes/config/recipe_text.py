"""The text of a recipe: one YAML mapping, read without TRL, its `env:` block put into force before torch is imported.

Whatever the file holds, it is read within a second or refused with one message: bytes that are no text, nesting without
end, aliases that multiply, a hundred thousand keys.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.pinned_memory import limit_rounding

LARGEST_FILE = 1 << 20  # bytes; the recipes here have 2,000
MOST_VALUES = 10_000  # keys, values and entries, each alias counted as what it stands for
DEEPEST = 50  # mappings and lists inside one another
LARGEST_INTEGER = 2**63 - 1  # what the libraries' own integers hold


class RecipeFile(dict):
    """A recipe's mapping that remembers the line of each key."""

    lines: dict[str, int]


def read_recipe_file(path: Path) -> RecipeFile:
    """The recipe's mapping, its `env:` block already put into the environment. Raises Refusal."""
    text = _bytes_of(path)
    try:
        mapping = _load(path, text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, such as 2024-13-45
        raise refusal("ZR117", path=path, error=str(error).replace("\n", " ")) from None
    if mapping is None:
        raise refusal("ZR118", path=path)
    env = mapping.pop("env", None) or {}
    if not isinstance(env, dict):
        raise refusal("ZR119", path=path)
    for name, value in env.items():
        _refuse_variable(path, name, value)
    for name, value in env.items():
        os.environ[name] = str(value)
    limit_rounding(os.environ)
    return mapping


def _bytes_of(path: Path) -> bytes:
    try:
        if path.is_file():
            size = path.stat().st_size
            text = path.read_bytes() if size <= LARGEST_FILE else b""
        elif path.exists():
            raise OSError(0, "It is not a file")
        else:
            raise _absent(path)
    except OSError as error:
        raise refusal("ZR144", path=path, strerror=error.strerror) from None
    if size > LARGEST_FILE:
        raise refusal("ZR146", path=path, size=size, largest_file=LARGEST_FILE)
    return text


def _absent(path: Path) -> Refusal:
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1, 0.5)
    return refusal(
        "ZR116",
        path=path,
        cwd=Path.cwd(),
        fix=f"Did you mean {path.parent / near[0]}?" if near else "Check the path; the recipes stand in recipes/.",
    )


def _refuse_variable(path: Path, name: Any, value: Any) -> None:
    """Refuse what the environment cannot hold. Raises Refusal."""
    if not isinstance(name, str) or not name or "=" in name:
        raise refusal("ZR147", name=name, path=path)
    if value is None or isinstance(value, (dict, list, set)):
        raise refusal("ZR148", name=name, path=path, what="empty" if value is None else "not one value")


class _Loader(yaml.SafeLoader):
    """PyYAML's, with an error for a key that stands twice in one mapping, and with limits.

    ruamel.yaml has the first, but it reads 1e-5 as a number: a recipe must mean what TRL's PyYAML makes of it.
    """

    depth = values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self.depth, self.values = self.depth + 1, self.values + 1
        if self.depth > DEEPEST or self.values > MOST_VALUES:
            line = self.peek_event().start_mark.line + 1
            raise _too_much(self.name, line, self.depth > DEEPEST)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
            raise refusal("ZR149", name=self.name, line=node.start_mark.line + 1, value=node.value[:40])
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise refusal("ZR126", value=key.value, name=self.name, lines=lines[key.tag, key.value], line=line)
            lines[key.tag, key.value] = line
        return node

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        try:
            number = self.construct_yaml_int(node)
        except ValueError:
            if len(node.value) < sys.get_int_max_str_digits():
                raise
            number = None  # more digits than Python reads
        if number is None or abs(number) > LARGEST_INTEGER:
            raise refusal(
                "ZR150",
                name=self.name,
                line=node.start_mark.line + 1,
                number_of_value=len(node.value),
                largest_integer=LARGEST_INTEGER,
            )
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def _load(path: Path, text: bytes) -> RecipeFile | None:
    """The file's mapping (None if it holds none). Raises Refusal for a key that is not text or stands twice."""
    stream = io.BytesIO(text)
    stream.name = str(path)  # errors then name it, and a wrong encoding is one of them
    loader = _Loader(stream)
    node = loader.get_single_node()
    if not isinstance(node, yaml.MappingNode):
        return None
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            raise refusal("ZR125", path=path, line=line)
        lines[key.value] = line
    _refuse_multiplied(path, node)
    mapping = RecipeFile(loader.construct_document(node))
    mapping.lines = lines
    return mapping


def _refuse_multiplied(path: Path, document: yaml.Node) -> None:
    """Refuse aliases that stand for more than a recipe holds, or for themselves. Raises Refusal."""
    sizes: dict[int, int | None] = {}  # of each node, its aliases counted in full; None while it is being counted

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = None
            inner = node.value if isinstance(node, yaml.CollectionNode) else []
            entries = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
            sizes[id(node)] = 1 + sum(size(entry) for entry in entries)
        known = sizes[id(node)]
        if known is None:
            raise refusal("ZR151", path=path, line=node.start_mark.line + 1)
        if known > MOST_VALUES:
            raise _too_much(str(path), node.start_mark.line + 1, deep=False)
        return known

    size(document)


def _too_much(name: str, line: int, deep: bool) -> Refusal:
    limit = f"{DEEPEST} levels inside one another" if deep else f"{MOST_VALUES:,} values, aliases counted in full"
    return refusal("ZR152", name=name, line=line, limit=limit)
