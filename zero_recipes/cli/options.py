"""Values of the verbs' options that argparse alone would let through: counts, seconds, ports, folders, names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from zero_recipes.config.accelerate import FOLDER, read_accelerate_file
from zero_recipes.core.findings import refusal

RECIPE = "a recipe, e.g. recipes/pythia.yaml"
CONFIG_FILE = "the accelerate file of the launch to come, as for accelerate launch, e.g. zero3.yaml"


def subcommand(subparsers, name: str, text: str, **more):
    """The parser of one subcommand; `text` stands in both --helps. Options are taken by their whole names alone:
    `--num_proc` is no `--num_processes`, it may be a key of the recipe."""
    said = {"help": text, "description": f"{text[0].upper()}{text[1:]}."} | more
    return subparsers.add_parser(name, allow_abbrev=False, **said)


def number(option: str, kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """argparse's `type` for a number from `low` to `high`; a `low` of 0 is itself none. It raises Refusal."""
    words = f"{'a whole number' if kind is int else 'a number'} {'above' if low == 0 else 'of at least'} {low:,}"
    words += "" if high == math.inf else f" and at most {high:,}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not (low < value if low == 0 else low <= value) or not value <= high or math.isinf(value):
            raise refusal("ZR350", option=option, text=text[:40], words=words)
        return value

    return parse


def names(text: str, option: str, each: bool = False) -> list[str]:
    """The names in a list by comma; there must be one, or `each` must be one. Raises Refusal."""
    listed = [name.strip() for name in text.split(",")]
    found = [name for name in listed if name]
    if not found or (each and found != listed):
        raise refusal("ZR351", option=option, text=text)
    return found


def strategies_asked(strategies: str | None, config_file: Path | None) -> list[str] | None:
    """The strategies that `--strategies` lists, or the one of `--config_file`; None without both. Raises Refusal."""
    if config_file is None:
        return None if strategies is None else names(strategies, "--strategies")
    if strategies is not None:
        raise refusal("ZR364", config_file=config_file, strategies=strategies)
    read_accelerate_file(config_file)
    own = FOLDER / f"{config_file.stem}.yaml"
    if not own.is_file() or not own.samefile(config_file):
        raise refusal("ZR365", config_file=config_file, folder=FOLDER, cwd=Path.cwd())
    return [config_file.stem]


def refuse_no_folder(path: Path, option: str, is_written: bool = True) -> None:
    """Refuse a folder that is a file, lies below one, or cannot be written. Raises Refusal."""
    place = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        why = f"{place} is not a folder."
    elif is_written and not os.access(place, os.W_OK | os.X_OK):
        why = f"{place} cannot be written by this user."
    else:
        return
    raise refusal("ZR352", option=option, path=path, why=why)
