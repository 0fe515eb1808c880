"""A recipe's file: a TRL YAML plus a few keys of our own. read.py merges it with the command line.

Reading it needs only PyYAML, for the recipe's `env:` has to be in force before torch is imported.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config.settings import Settings
from zero_recipes.core.allocator import ALLOCATOR, set_allocator
from zero_recipes.core.findings import refusal
from zero_recipes.core.library_errors import library_error_as_finding


class RecipeFile(dict):
    """The keys and values of a recipe's file, without its `env:` block."""

    lines: dict[str, int]  # of each key
    environment: dict[str, str]  # to be set before torch is imported: `env:`, and torch's allocators


@library_error_as_finding("reading the recipe")
def read_recipe_file(path: Path) -> RecipeFile:
    """Read a recipe's file. Nothing is set in this process, and no key is checked.

    Raises Refusal for a file that is missing, no YAML, or no mapping of names, or that has a key twice.
    """
    if not path.is_file():
        names = [recipe.name for recipe in path.parent.glob("*.yaml") if recipe.is_file()]
        near = difflib.get_close_matches(path.name, names, 1, 0.5)
        fix = "Check the path; the recipes are in recipes/."
        if near:
            fix = f"Did you mean {path.parent / near[0]}?"
        if path.is_dir():
            fix = "It is a folder. Name a file in it."
        raise refusal("ZR116", path=path, cwd=Path.cwd(), fix=fix)
    try:
        mapping = _load(path)
    except yaml.YAMLError:
        _refuse_tab(path)
        raise
    env = mapping.pop("env", None) or {}
    if not isinstance(env, dict) or any(value is None or isinstance(value, (dict, list)) for value in env.values()):
        raise refusal("ZR119", path=path)
    mapping.environment = {str(name): str(value) for name, value in env.items()}
    in_force = os.environ | mapping.environment
    set_allocator(in_force)
    mapping.environment |= {name: in_force[name] for name in ALLOCATOR if name in in_force}
    return mapping


def recipe_in_force(path: Path) -> RecipeFile:
    """Read a recipe's file, and set its environment in this process. Raises Refusal as `read_recipe_file` does."""
    mapping = read_recipe_file(path)
    os.environ.update(mapping.environment)
    return mapping


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, with an error for a key that occurs twice in one mapping.

    ruamel.yaml has that, but it reads 1e-5 as a number: a recipe must mean what TRL's PyYAML makes of it.
    """

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise refusal("ZR126", key=key.value, path=self.name, first=lines[key.tag, key.value], line=line)
            lines[key.tag, key.value] = line
        return node


def _load(path: Path) -> RecipeFile:
    """Load the YAML and note the line of each key. Raises Refusal."""
    with path.open("rb") as stream:  # errors then name the file, and a wrong encoding is one of them
        loader = _Loader(stream)
        node = loader.get_single_node()
        names = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}
        if not isinstance(node, yaml.MappingNode) or not {key.tag for key, _ in node.value} <= names:
            raise refusal("ZR118", path=path)
        mapping = RecipeFile(loader.construct_document(node))
    mapping.lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    return mapping


def _refuse_tab(path: Path) -> None:
    """Refuse the first line of a file, which is no YAML, that begins with a tab: that is why."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if b"\t" in line[: len(line) - len(line.lstrip())]:
            raise refusal("ZR913", path=path, line=number)


@dataclass(frozen=True)
class Recipe:
    """One recipe with its overrides, as the file and the command line say it. Nothing writes into it.

    Args:
        path: the recipe's file.
        settings: the value of every known key, defaults included.
        explicit: only the keys that the file or the command line names.
        sha256: of the file's bytes.
    """

    path: Path
    settings: Settings
    explicit: Mapping[str, Any]
    sha256: str

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def output_dir(self) -> Path:
        """The folder that the run writes into; TRL would take `trainer_output` for every recipe."""
        return Path(self.settings.output_dir or f"output/{self.name}")
