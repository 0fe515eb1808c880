"""The command line of zero-recipes is parsed here. Its subcommands and their options stand in verbs.py."""

import argparse
import sys

from zero_recipes.tools.verbs import VERBS, Verb


def parse_arguments(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """Parse a command line, or this process's own. `func` of the result runs the subcommand.

    An option that is unknown overrides a key of the recipe, where the subcommand takes one. Else the process ends with
    exit code 2, as for any other fault of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="zero-recipes",
        description=description,
        epilog="For options, run zero-recipes SUBCOMMAND --help. See also docs/commands.md.",
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")
    for verb in VERBS:
        _add_verb(commands, verb)

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


def _add_verb(commands, verb: Verb) -> None:
    """Its help is shown in both --helps.

    Names are never abbreviated: `--num_proc` may be a key of the recipe, not `--num_processes`.
    """
    text = verb.help
    if verb.takes_overrides:
        text += "; other options override the recipe's keys"
    parser = commands.add_parser(verb.name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.set_defaults(func=verb.run)
    if verb.takes_overrides:
        parser.set_defaults(overrides=[])
    verb.add_arguments(parser)
