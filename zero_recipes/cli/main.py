"""Check, plan, measure and compare runs of run_sft.py, and look after what they leave."""

from __future__ import annotations

import argparse
import sys

from zero_recipes.cli import verbs
from zero_recipes.cli.check import add_check
from zero_recipes.cli.env import add_env
from zero_recipes.core.findings import Refusal, print_ending, refusal
from zero_recipes.libs.warnings import quieten_loggers

# each adds its parser, with set_defaults(func=...); func takes the arguments and returns the exit code
VERBS = (
    verbs.add_fetch,
    add_check,
    verbs.add_plan,
    verbs.add_sweep,
    verbs.add_report,
    verbs.add_ask,
    verbs.add_verify,
    verbs.add_reshard,
    verbs.add_meet,
    verbs.add_explain,
    add_env,
)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The verb's arguments, with `func` that runs it."""
    parser = argparse.ArgumentParser(
        prog="zero-recipes", description=__doc__, epilog="zero-recipes SUBCOMMAND --help; docs/commands.md has more."
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")
    for add in VERBS:
        add(subparsers)
    arguments, rest = parser.parse_known_args(argv)
    if hasattr(arguments, "overrides"):  # the verb takes unknown options: they override the recipe's keys
        arguments.overrides = rest
    elif rest:
        parser.error(f"unknown: {' '.join(rest)}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0 done, 1 a run or a check failed, 2 refused."""
    quieten_loggers()
    with_traceback = "--traceback" in (sys.argv if argv is None else argv)
    arguments = parse_arguments(argv)
    try:
        return arguments.func(arguments)
    except Refusal as refused:
        return print_ending(refused, with_traceback)
    except OSError as error:  # a path of the command line: no such file, no folder, not to be read or written
        refused = refusal("ZR352", error=error)
        refused.__cause__ = error
        return print_ending(refused, with_traceback)


if __name__ == "__main__":
    sys.exit(main())
