"""What an option of the command line may be: argparse's `type` of each."""

import argparse
from pathlib import Path

from zero_recipes.core.files import at_hand


def amount(text: str) -> float:
    """Read a number above zero."""
    return _above_zero(text, float(text))


def count(text: str) -> int:
    """Read a whole number above zero."""
    number = int(text)
    _above_zero(text, number)
    return number


# what argparse calls them where it refuses a text: "invalid number value: 'x'"
amount.__name__ = "number"
count.__name__ = "number"


def _above_zero(text: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def names(text: str) -> list[str]:
    """Read names that commas separate."""
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return listed


def recipe_file(text: str) -> Path:
    """Find a recipe by its path, or by its name among those of the package."""
    return at_hand(text, "recipes")


def accelerate_file(text: str) -> Path:
    """Find an accelerate file by its path, or by its name among those of the package."""
    return at_hand(text, "accelerate_configs")
