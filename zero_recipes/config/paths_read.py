"""The files and folders that a run reads: what it deletes or moves may not be among them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_recipes.config.settings import Settings

# keys whose text may be a path without a slash in it; of any other key, text with one that exists is taken for a path
PATHS = {"model_name_or_path", "dataset_name", "datasets", "chat_template_path", "sample_prompts", "deepspeed"}
PATHS |= {"resume_from_checkpoint", "fsdp_config", "accelerator_config"}
WRITTEN = {"output_dir", "nvme_path", "run_name"}
DATA = {"dataset_name", "datasets"}


@dataclass(frozen=True)
class Input:
    """One path that a run reads, there at the moment."""

    key: str  # of the recipe, or what else names it
    path: Path
    deep: bool  # a folder that is read with all that is below it

    def files(self) -> Iterator[Path]:
        """The path, and where it is a folder what is read of it, links resolved."""
        yield self.path.resolve()
        if self.path.is_dir():
            yield from (found.resolve() for found in self.path.glob("**/*" if self.deep else "*"))

    def first_of(self, paths: list[Path]) -> Path | None:
        """The first of these real files and folders without which the input were not there, or not whole."""
        read = set(self.files())
        used = {path for found in read for path in (found, *found.parents)}
        folders = {path: path.parents if self.deep else [path.parent] for path in paths}
        for path in paths:
            below = self.deep and not read.isdisjoint(path.parents)  # also by way of a link to a folder
            mounted_twice = self.path.is_dir() and any(f.samefile(self.path) for f in folders[path] if f.exists())
            if path in used or below or mounted_twice:
                return path
        return None


def inputs_of(settings: Settings, recipe: Path, environment: Mapping[str, str]) -> list[Input]:
    """What exists of what the recipe, its keys and the launcher's environment name. `settings`: as the recipe says."""
    found = [Input("the recipe", recipe, False)]
    for key, value in settings.as_dict().items():
        if key not in WRITTEN:
            paths = (path for text in _texts(value) for path in _paths(text, key in PATHS))
            found += [Input(key, path, key in DATA or key == "resume_from_checkpoint") for path in paths]
    for entry in settings.datasets if isinstance(settings.datasets, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("path"), str):
            names = [
                os.path.join(entry["path"], text) for text in _texts([entry.get("data_files"), entry.get("data_dir")])
            ]
            found += [Input("datasets", path, True) for name in names for path in _paths(name, True)]
    config = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    found += [Input("the DeepSpeed configuration", path, False) for path in _paths(config or "", True)]
    return found + [base for model in found if model.key == "model_name_or_path" for base in _base_of(model.path)]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _paths(text: str, surely: bool) -> list[Path]:
    """The path that a text names, if there is one; of a pattern with wildcards the folder that they stand in."""
    with suppress(OSError, ValueError):  # too long, a NUL: no path
        path = Path(text).expanduser()
        while surely and not path.exists() and any(mark in str(path) for mark in "*?["):
            path = path.parent
        if text and (surely or os.sep in text) and path.exists():
            return [path]
    return []


def _base_of(model: Path) -> list[Input]:
    """The model that an adapter stands on."""
    try:
        base = json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"]
        return [Input("model_name_or_path (the adapter's base)", path, False) for path in _paths(base, True)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
