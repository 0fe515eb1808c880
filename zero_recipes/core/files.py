"""Files that are written whole or not at all, JSON as the standard has it, and the files that the package brings."""

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_json

PART = ".zero-recipes.part"  # ends the name of what is not yet written, or not yet deleted, to its end
# links to the repository's folders; in a wheel, copies
FILES = Path(__file__).resolve().parents[1] / "_files"


def at_hand(named: str | Path, folder: str = "") -> Path:
    """The path as it is named, also within `folder`; where nothing is there, the package's file of that name."""
    for base in (".", FILES):
        for inner in ("", folder):
            path = Path(base, inner, named)
            if os.path.exists(path):  # pathlib raises at a name that is too long
                return path
    return Path(named)


@cache
def package_yaml(package: str, name: str) -> dict[str, Any]:
    """A YAML file beside a package's code."""
    return load_yaml(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def load_yaml(text: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time
    return yaml.load(text, loader)


NAMES: dict[str, Any] = package_yaml(__package__, "files.yaml")  # of files, by kind


def write_text(path: Path, text: str) -> None:
    """A reader never sees half a file, nor two processes' halves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def encodable(text: str) -> str:
    """With half surrogate pairs, which no file takes, as Python writes them."""
    return text.encode("utf-8", "backslashreplace").decode()


def strict_json(document: Any, indent: int | None = None) -> str:
    """A number that is not finite becomes null: `NaN` is no JSON. Letters of every script stay as they are."""
    return to_json(document, indent=indent, inf_nan_mode="null").decode()


def write_json(path: Path, document: Any) -> None:
    write_text(path, strict_json(document, indent=2) + "\n")
