"""The command line of a run: the recipe first, then `--key value` for each key that it overrides."""

import argparse
import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

from zero_recipes.core.files import at_hand
from zero_recipes.core.findings import refusal

USAGE = "run_sft.py RECIPE.yaml [--key value ...] [--traceback]"
HIDDEN = "***"  # stands for a token


class Override(NamedTuple):
    """One `--key` of the command line, with the words that belong to it."""

    key: str  # empty for words before the first `--`
    words: tuple[str, ...]  # as they were typed, `--key` included

    @property
    def text(self) -> str | None:
        """The value where it is a single word, as in `--key value` and `--key=value`, else None."""
        _, equals, joined = self.words[0].partition("=")
        values = self.words[1:]
        if equals:
            values = (joined, *values)
        return values[0] if len(values) == 1 else None


def split_command_line(argv: list[str]) -> tuple[Path, list[str]]:
    """Divide the words of a run into the recipe's path and the overrides. Raises Refusal without a recipe.

    `--local_rank`, of the deepspeed launcher, goes to LOCAL_RANK. `--traceback` is dropped: it is read where the run
    ends.
    """
    parser = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--local_rank", "--local-rank")
    parser.add_argument("--traceback", action="store_true")
    known, rest = parser.parse_known_args(argv)
    if known.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", known.local_rank)
    if not rest or rest[0].startswith("-"):
        found = "no argument was given"
        if rest:
            found = f"the first argument is {rest[0]!r}"
        raise refusal("ZR115", found=found, usage=USAGE)
    return at_hand(rest[0], "recipes"), rest[1:]


def split_overrides(words: Sequence[str]) -> list[Override]:
    """Group the words by the `--key` that they follow, in the order in which they were typed."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    overrides = []
    for group in groups:
        key = key_of(group[0]) if group[0].startswith("--") else ""
        overrides.append(Override(key, tuple(group)))
    return overrides


def key_of(word: str) -> str:
    """The key that a word of the command line names: "--max-steps=5" names max_steps."""
    return word[2:].partition("=")[0].replace("-", "_")


def named_on(overrides: Sequence[str], known: Container[str]) -> set[str]:
    """The keys that the command line names; `--no_save_model` names save_model."""
    names = {key_of(word) for word in overrides if word.startswith("--")}
    return {recipe_key(name, known) for name in names}


def recipe_key(name: str, known: Container[str]) -> str:
    """The key behind an option of TRL's parser, which has `--no_KEY` for switches that are on."""
    return name if name in known else name.removeprefix("no_")


def words_without_tokens(words: Sequence[str]) -> list[str]:
    """A command line as it may be written down: the value of hub_token is hidden."""
    shown: list[str] = []
    is_token = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_token:
            shown.append(HIDDEN)
        elif equals and key_of(name) == "hub_token":
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(word)
        is_token = not is_token and not equals and key_of(word) == "hub_token"
    return shown
