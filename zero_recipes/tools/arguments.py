"""The command line of zero-recipes: its subcommands and their options stand in verbs.yaml."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_recipes.core.files import at_hand, package_yaml
from zero_recipes.tools import check, import_config, train, verbs

# what runs a subcommand and returns the exit code; the others are functions of verbs.py, by their names
FUNCTIONS = {"init": train.init, "train": train.train, "check": check.check, "import": import_config.import_}


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse `type`."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return number


def recipe_file(text: str) -> Path:
    return at_hand(text, "recipes")


def accelerate_file(text: str) -> Path:
    return at_hand(text, "accelerate_configs")


def names(text: str) -> list[str]:
    """An argparse `type`: comma-separated names."""
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return listed


TYPES = {
    "accelerate_file": accelerate_file,
    "amount": above_zero(float),
    "count": above_zero(int),
    "integer": int,
    "names": names,
    "path": Path,
    "recipe_file": recipe_file,
}


def parse_arguments(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """`func` of the result runs the subcommand."""
    parser = argparse.ArgumentParser(
        prog="zero-recipes",
        description=description,
        epilog="For options, run zero-recipes SUBCOMMAND --help. See also docs/commands.md.",
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")
    for name, row in package_yaml("zero_recipes.tools", "verbs.yaml")["verbs"].items():
        add_verb(commands, name, row)

    words = list(sys.argv[1:] if argv is None else argv)
    options = [word.partition("=")[0] for word in words]
    if options[:1] == ["plan"] and "--params" in options:
        words.insert(1, "")  # in the recipe's place, which argparse would give to the first value of an override
    arguments, rest = parser.parse_known_args(words)
    if hasattr(arguments, "overrides"):
        arguments.overrides = rest
    elif rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return arguments


def add_verb(commands, name: str, row: dict[str, Any]) -> None:
    """`row`: of verbs.yaml. Its help is shown in both --helps.

    Names are never abbreviated: `--num_proc` may be a key of the recipe, not `--num_processes`.
    """
    text = row["help"]
    if "overrides" in row:
        text += "; other options override the recipe's keys"
    verb = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    verb.set_defaults(func=FUNCTIONS.get(name) or getattr(verbs, name), **row.get("defaults", {}))
    if "overrides" in row:
        verb.set_defaults(overrides=[])
    exclusive = row.get("exclusive", ())
    one_of = verb.add_mutually_exclusive_group() if exclusive else verb
    for flags, keywords in row["arguments"].items():
        options = dict(keywords)
        if "type" in options:
            options["type"] = TYPES[options["type"]]
        place = one_of if flags in exclusive else verb
        place.add_argument(*flags.split(), **options)
