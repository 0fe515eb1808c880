"""docs/commands.md names every subcommand, every option of `plan` and every GPU; every --help says what it is for."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.core.host import gpus

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()


def subcommands() -> dict[str, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for add in cli.VERBS:
        add(subparsers)
    return subparsers.choices


def test_the_page_has_every_subcommand_with_an_example():
    table, _, rest = PAGE.partition("```bash")
    named = re.findall(r"^\| \[?`(\w+)`", table, re.MULTILINE)
    assert sorted(named) == sorted(subcommands())
    assert set(re.findall(r"^zero-recipes (\w+)", rest.partition("```")[0], re.MULTILINE)) == set(named)


def test_the_page_has_every_option_of_plan_and_every_gpu():
    section = PAGE.partition("\n## plan")[2].partition("\n## ")[0]
    options = {name for action in subcommands()["plan"]._actions for name in action.option_strings}
    assert set(re.findall(r"`(--\w+)", section)) - {"--skip_plan"} == options - {"-h", "--help"}
    assert [name for name in gpus() if f"`{name}`" not in section] == []


@pytest.mark.parametrize("name", sorted(subcommands()))
def test_help_says_what_it_is_for_and_what_each_option_takes(name):
    parser = subcommands()[name]
    assert parser.description and not parser.allow_abbrev
    assert [action.dest for action in parser._actions if not action.help] == []


def test_a_key_of_the_recipe_is_not_taken_for_an_option_that_begins_so():
    arguments = cli.parse_arguments(["check", "recipes/tiny.yaml", "--num_proc", "4"])
    assert arguments.num_processes is None and arguments.overrides == ["--num_proc", "4"]
