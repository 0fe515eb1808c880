"""Files that a subcommand writes for a person, who may have some of that name already."""

from collections.abc import Mapping
from pathlib import Path

from zero_recipes.core.files import write_text
from zero_recipes.core.findings import refusal


def write_new(texts: Mapping[Path, str]) -> None:
    """Write and print all files, or none: raises Refusal if one exists."""
    for path in texts:
        if path.exists():
            raise refusal("ZR895", path=path)
    for path, text in texts.items():
        write_text(path, text)
        print(f"written: {path}")
