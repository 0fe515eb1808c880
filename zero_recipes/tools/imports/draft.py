"""A recipe in the making: its keys, and what is said of those of the other trainer that it lacks."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# of a key without a counterpart: no effect on the run; what the run does not do; what the weights lack; no run at all
REMARKS = ("note", "loses", "changes", "refuses")
TITLES = {"note": "note", "loses": "not supported", "changes": "open point"}


@dataclass
class Line:
    """A key of the recipe, with where it comes from."""

    value: Any
    key: str | None  # of the other trainer, that it comes from; None for one of its defaults
    why: str


@dataclass
class Draft:
    """A recipe in the making, and what it lacks."""

    path: Path  # of the other trainer's file
    at: Path  # where the recipe will be
    source: str  # the other trainer
    theirs: dict[str, Any]  # its keys: "optimizer.lr" stands in the block `optimizer`
    order: list[str]  # its keys as they follow each other in the file, blocks as one
    recipe: dict[str, Line] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)  # beside the recipe
    # {kind of REMARKS: {the other trainer's key: what it means}}
    remarks: dict[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in REMARKS})

    @property
    def open_points(self) -> dict[str, str]:
        """What the recipe trains instead, by the other trainer's key."""
        return self.remarks["changes"]

    def put(self, key: str | None, why: str, **values: Any) -> None:
        """Set keys of the recipe. `key`: of the other trainer, where its file has it."""
        for name, value in values.items():
            if isinstance(value, dict) and name in self.recipe:
                value = self.recipe[name].value | value
            self.recipe[name] = Line(value, key, why)

    def value(self, name: str, default: Any = None) -> Any:
        """Look up what a key of the recipe is set to."""
        line = self.recipe.get(name)
        return default if line is None else line.value

    def key_behind(self, name: str) -> str:
        """The other trainer's key that a key of the recipe comes from; for one of its defaults the recipe's own."""
        return self.recipe[name].key or name

    def note(self, key: str, text: str) -> None:
        """Say what the other trainer's key means, which has no effect on the run."""
        self._add("note", key, text)

    def loses(self, key: str, text: str) -> None:
        """Say what the run does not do; its weights are the same."""
        self._add("loses", key, text)

    def changes(self, key: str, text: str) -> None:
        """Say why the weights are others. This becomes an open point of the recipe."""
        self._add("changes", key, text)

    def add_remarks(self, key: str, row: Mapping[str, Any]) -> None:
        """Say all that a row of a table in config/imports says of a key."""
        for kind in REMARKS:
            if kind in row:
                self._add(kind, key, row[kind])

    def _add(self, kind: str, key: str, text: str) -> None:
        """A key may have several remarks: one for each item of a list."""
        effects = self.remarks[kind].get(key, "").split("; ")
        if text not in effects:
            effects.append(text)
        self.remarks[kind][key] = "; ".join(filter(None, effects))

    def find(self, named: str) -> Path | None:
        """A file that the other trainer names: seen from the current folder, or from one above its own file."""
        for folder in (Path.cwd(), *self.path.absolute().parents):
            with contextlib.suppress(OSError):  # a name that no file system takes
                if (folder / named).is_file():
                    return folder / named
        return None

    def told(self) -> list[str]:
        """What is said of the keys that are not carried, one line a key."""
        return [line for _, line in self._remarks_by_place()]

    def _remarks_by_place(self) -> list[tuple[int, str]]:
        lines = []
        for kind, title in TITLES.items():
            for key, effect in self.remarks[kind].items():
                lines.append((self._place(key), f"{title}: {_one_line(key)}: {_one_line(effect)}"))
        return lines

    def _place(self, key: str | None) -> int:
        """Where the other trainer's file has the key; its defaults come last."""
        if key is None:
            return len(self.order) + 1
        for name in (key, key.partition(": ")[0], key.partition(".")[0]):
            if name in self.order:
                return self.order.index(name)
        return len(self.order)

    def text(self) -> str:
        """The recipe, its keys in the order of the other trainer's file, with the remarks where they belong."""
        blocks = [(place, [f"# {line}"]) for place, line in self._remarks_by_place()]
        for name, line in self.recipe.items():
            blocks.append((self._place(line.key), _yaml_lines(name, line.value, line.why)))
        blocks.sort(key=lambda block: block[0])
        lines = [f"# Written by zero-recipes import {_one_line(str(self.path))} ({self.source})."]
        for _, block in blocks:
            lines += block
        if self.open_points:
            points = [f"{_one_line(key)}: {_one_line(effect)}" for key, effect in self.open_points.items()]
            lines.append("# Repeated by check and by each run. Take out what you have settled.")
            lines += _yaml_lines("open_points", points, "open_points")
        return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """For a comment: a line break in another trainer's key would begin a key of the recipe."""
    words = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(words.split())


def _yaml_lines(name: str, value: Any, why: str) -> list[str]:
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000)
    first, *rest = text.splitlines()
    if why != name:
        first = f"{first}  # {_one_line(why)}"
    return [first, *rest]
