"""Subcommands of a few lines. Each returns the exit code.

Imports are local: `zero-recipes --help` need not wait for torch.
"""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from zero_recipes.core.findings import described, refusal, table
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.run_end import REFUSED
from zero_recipes.core.tables import working
from zero_recipes.engine.warnings import quieten
from zero_recipes.metrics.schema import ORDER as STAGES

IMPORTING = "importing the libraries"


def _elsewhere(name: str) -> Callable[[argparse.Namespace], int]:
    """The verb in the module of its name."""

    def verb(arguments: argparse.Namespace) -> int:
        with working(IMPORTING):
            quieten()
            module = import_module(f"zero_recipes.tools.{name}")
        return getattr(module, name)(arguments)

    verb.__name__ = name
    return verb


ask = _elsewhere("ask")
tune = _elsewhere("tune")
export = _elsewhere("export")
rent = _elsewhere("rent")
rehearse = _elsewhere("rehearse")


def plan(arguments: argparse.Namespace) -> int:
    quieten()
    from zero_recipes.tools.plan import command

    return command.run(arguments, arguments.overrides)


def sweep(arguments: argparse.Namespace) -> int:
    with working(IMPORTING):
        from zero_recipes.tools.sweep import sweep

    output_dir = arguments.output_dir or Path("output") / f"{arguments.recipe.stem}-sweep"
    strategies = arguments.strategies or list(STAGES)
    runs = (arguments.recipe, strategies, arguments.num_processes, output_dir, arguments.overrides)
    statuses = sweep(*runs, sets=arguments.sets).values()
    print(f"zero-recipes report {output_dir}")
    fine = {"ok"}
    if arguments.sets and "ok" in statuses:
        fine.add("refused")  # what cannot run here is an answer too
    return 0 if fine.issuperset(statuses) else 1


def report(arguments: argparse.Namespace) -> int:
    from zero_recipes.tools.report.page import write_report

    print(f"report: {write_report(arguments.folder)}")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    from zero_recipes.tools.verify import verify

    if not arguments.folder.is_dir():
        raise refusal("ZR796", folder=arguments.folder, cwd=Path.cwd())
    found = verify(arguments.folder, arguments.deep, arguments.trust_remote_code)
    counts = "{tensors} tensors, {parameters:,} parameters, {bytes:,} bytes".format_map(found)
    print(f"{arguments.folder}: complete, {counts}")
    return 0


def push(arguments: argparse.Namespace) -> int:
    from huggingface_hub import create_repo

    from zero_recipes.core.folder_lock import held
    from zero_recipes.training import card

    if not (arguments.folder / "metrics.json").is_file():
        raise refusal("ZR901", folder=arguments.folder)
    with held(arguments.folder, "push"):  # a run would change the files meanwhile
        with library_error_as_finding(f"creating {arguments.hub_model_id} on the hub"):
            repo = create_repo(arguments.hub_model_id, private=arguments.private or None, exist_ok=True).repo_id
        print(f"pushed: {card.push(arguments.folder, repo)}")
    return 0


def reshard(arguments: argparse.Namespace) -> int:
    from zero_recipes.core.folder_lock import HELD
    from zero_recipes.core.process import end_with_parent

    if HELD in os.environ:
        end_with_parent()  # the run that started this: once it has ended, nobody holds the folder
    quieten()
    from zero_recipes.checkpoint.save import read_manifest
    from zero_recipes.tools.reshard import reshard, resume_command

    layout = (arguments.world_size, arguments.stage)
    folder, batch = reshard(arguments.checkpoint, *layout, arguments.skip_checksums)
    strategy = read_manifest(folder)["strategy"]
    print(f"written: {folder}")
    print(f"global batch unchanged: {batch.total} sequences ({batch})")
    print(f"resume with:\n{resume_command(folder, batch, strategy)}")
    return 0


def explain(arguments: argparse.Namespace) -> int:
    code = arguments.code.upper()
    if code not in table():
        print(f"unknown code {code}; docs/codes.md lists all codes", file=sys.stderr)
        return REFUSED
    row = described(code)
    print(f"{code} ({row['area']}, {row['level']}): {row['what']}")
    for part in ("why", "fix", "source"):
        if part in row:
            print(f"    {part}: {row[part]}")
    if "ignore" in row:
        print(f"    --ignore {code} makes it a warning: {row['ignore']}")
    if "example" in row:
        print("\nexample:")
        for line in row["example"].splitlines():
            print(f"    {line}")
    return 0
