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

from zero_recipes.core.errors import Refusal
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
        raise Refusal(
            "ZR117", f"{path} is not YAML", str(error).replace("\n", " "), "Correct the line that it names."
        ) from None
    if mapping is None:
        raise Refusal(
            "ZR118",
            f"{path} is not a mapping of keys to values",
            "A recipe is one YAML mapping, as for `trl sft --config`.",
            "Write one `key: value` a line; recipes/tiny.yaml is a short example.",
        )
    env = mapping.pop("env", None) or {}
    if not isinstance(env, dict):
        raise Refusal(
            "ZR119", f"`env:` in {path} is not a mapping", "It names environment variables.", "env:\n      NAME: value"
        )
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
        raise Refusal(
            "ZR144",
            f"the recipe {path} cannot be read",
            f"{error.strerror}.",
            "Name a file that this user may read.",
        ) from None
    if size > LARGEST_FILE:
        raise Refusal(
            "ZR146",
            f"{path} has {size:,} bytes",
            f"No recipe is larger than {LARGEST_FILE:,}.",
            "Name data by its path instead of writing it into the recipe.",
        )
    return text


def _absent(path: Path) -> Refusal:
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1, 0.5)
    return Refusal(
        "ZR116",
        f"there is no recipe {path}",
        f"Paths are relative to the working directory, {Path.cwd()}.",
        f"Did you mean {path.parent / near[0]}?" if near else "Check the path; the recipes stand in recipes/.",
    )


def _refuse_variable(path: Path, name: Any, value: Any) -> None:
    """Refuse what the environment cannot hold. Raises Refusal."""
    if not isinstance(name, str) or not name or "=" in name:
        raise Refusal(
            "ZR147",
            f"{name!r} under `env:` in {path} cannot be the name of a variable",
            "A name is text without an equals sign.",
            "env:\n      NAME: value",
        )
    if value is None or isinstance(value, (dict, list, set)):
        raise Refusal(
            "ZR148",
            f"the variable {name} under `env:` in {path} is {'empty' if value is None else 'not one value'}",
            "A variable holds one text.",
            f'env:\n      {name}: "value"',
        )


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
            raise Refusal(
                "ZR149",
                f"{self.name}:{node.start_mark.line + 1} holds {node.value[:40]!a}",
                "A zero byte and half a surrogate pair are no text: no path, name or message can hold them.",
                "Write the character itself, in UTF-8.",
            )
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise Refusal(
                    "ZR126",
                    f"`{key.value}` stands twice in {self.name}, in lines {lines[key.tag, key.value]} and {line}",
                    "PyYAML takes the last one without a message.",
                    "Remove one of them.",
                )
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
            raise Refusal(
                "ZR150",
                f"the whole number in {self.name}:{node.start_mark.line + 1} has {len(node.value):,} digits",
                f"It lies beyond {LARGEST_INTEGER:,}, the largest whole number of the libraries.",
                "Write a smaller number, or quote it if it is meant as text.",
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
            raise Refusal(
                "ZR125", f"the key in {path}:{line} is not text", "Keys are names.", "Write one `key: value` a line."
            )
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
            raise Refusal(
                "ZR151",
                f"the alias in {path}:{node.start_mark.line + 1} stands inside of what it names",
                "Such a value has no end.",
                "Write the value out, without the alias.",
            )
        if known > MOST_VALUES:
            raise _too_much(str(path), node.start_mark.line + 1, deep=False)
        return known

    size(document)


def _too_much(name: str, line: int, deep: bool) -> Refusal:
    limit = f"{DEEPEST} levels inside one another" if deep else f"{MOST_VALUES:,} values, aliases counted in full"
    return Refusal(
        "ZR152",
        f"{name} holds more than a recipe can, at line {line}",
        f"The limit is {limit}.",
        "Is it another file? Name data by its path instead of writing it into the recipe.",
    )
