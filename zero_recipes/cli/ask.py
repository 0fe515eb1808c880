"""`zero-recipes ask`: the parser of the verb."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_recipes.cli.options import above_zero, subcommand


def add_ask(verbs) -> None:
    verb = subcommand(
        verbs,
        "ask",
        "a saved model beside its base on the same prompts, scored; or a conversation with it",
        description="A saved model and its base answer the same prompts, side by side and scored as a run scores its "
        "samples, with ROUGE and perplexity. Other options override the recipe's keys.",
    )
    verb.add_argument("model", type=Path, help="a run's output_dir, a checkpoint-N, a model or a PEFT adapter")
    verb.add_argument("--base", help="folder or name; default: of the run's recipe or the adapter; none: no base")
    either = verb.add_mutually_exclusive_group()
    prompts = "rows as JSON Lines, or a prompt a line; default: the recipe's sample_prompts"
    either.add_argument("--prompts", type=Path, help=prompts)
    either.add_argument("--chat", action="store_true", help="talk to it; with --base to both")
    verb.add_argument(
        "--max_new_tokens",
        type=above_zero(int),
        help="longest answer in tokens; default: the recipe's sample_max_new_tokens, 256 in a conversation",
    )
    verb.add_argument("--output_dir", type=Path, help="for samples.jsonl; default: output/ask-<model>")
    verb.add_argument("--trust_remote_code", action="store_true", help="run the code that the model brings with it")
    verb.set_defaults(func=_ask, overrides=[])


def _ask(arguments: argparse.Namespace) -> int:
    from zero_recipes.libs.warnings import quieten

    quieten()
    from zero_recipes.ask.command import run

    return run(arguments, arguments.overrides)
