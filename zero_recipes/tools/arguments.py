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
        epilog="For options, run zero-recipes SUBCOMMAND --help.",
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")
    for verb in VERBS:
        _add_verb(commands, verb)

    words = list(sys.argv[1:] if argv is None else argv)
    if words and any(verb.name == words[0] and verb.has_trust_switch for verb in VERBS):
        words = with_trust_as_switch(words)
    options = [word.partition("=")[0] for word in words]
    if options[:1] == ["plan"] and "--params" in options:
        words.insert(1, "")  # in the recipe's place, which argparse would give to the first value of an override
    arguments, rest = parser.parse_known_args(words)
    if hasattr(arguments, "overrides"):
        arguments.overrides = rest
    elif rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return arguments


def with_trust_as_switch(words: list[str]) -> list[str]:
    """The words, with `--trust_remote_code true` as the switch alone, and none for `false`.

    Recipes and TRL's command line give the key a value. A folder may follow the switch, too.
    """
    kept = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name.replace("-", "_") != "__trust_remote_code":
            kept.append(word)
            continue
        if not equals and left and left[0].lower() in ("true", "false"):
            value = left.pop(0)
        if value.lower() != "false":
            kept.append("--trust_remote_code")
    return kept


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
