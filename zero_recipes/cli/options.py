"""What the subcommands' parsers share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from zero_recipes.config.accelerate import FOLDER, read_accelerate_file
from zero_recipes.core.findings import refusal

RECIPE = "a recipe, e.g. recipes/pythia.yaml"
OVERRIDES = "other options override the recipe's keys"
CONFIG_FILE = "the accelerate file of the launch to come, as for accelerate launch, e.g. zero3.yaml"


def subcommand(subparsers, name: str, text: str, **more):
    """The parser of one subcommand; `text` is in both --helps. Options are taken by their whole names alone:
    `--num_proc` is no `--num_processes`, it may be a key of the recipe."""
    described = {"help": text, "description": f"{text[0].upper()}{text[1:]}."} | more
    return subparsers.add_parser(name, allow_abbrev=False, **described)


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """argparse's `type` for a number above zero."""

    def number(text: str) -> float:
        if not 0 < (value := kind(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return number


COUNT, AMOUNT = above_zero(int), above_zero(float)


def names(text: str) -> list[str]:
    """argparse's `type` for names by comma."""
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return listed


def add_strategies(verb, default: str) -> None:
    """--strategies or --config_file, which `strategies_of` reads."""
    either = verb.add_mutually_exclusive_group()
    text = "names of accelerate_configs/*.yaml, by comma; or: all"
    either.add_argument("--strategies", type=names, help=f"{text}; default: {default}")
    one = "one of them by its file, as for accelerate launch, e.g. zero3.yaml"
    either.add_argument("--config_file", type=Path, help=one)


def strategies_of(arguments: argparse.Namespace) -> list[str] | None:
    """The strategies that the command line names; None where it names none. Raises Refusal."""
    file = arguments.config_file
    if file is None:
        return arguments.strategies
    read_accelerate_file(file)
    own = FOLDER / f"{file.stem}.yaml"
    if not own.is_file() or not own.samefile(file):
        raise refusal("ZR365", config_file=file, folder=FOLDER, cwd=Path.cwd())
    return [file.stem]
