"""The verbs that a few lines hand on to their package: the parser of each, and what it prints.

What a verb needs is imported where it runs: `zero-recipes --help` need not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zero_recipes.cli.options import RECIPE, above_zero, add_strategies, names, strategies_of, subcommand

DEFAULT_STRATEGIES = "ddp,zero0,zero1,zero2,zero3"


def add_fetch(verbs) -> None:
    verb = subcommand(verbs, "fetch", "download a recipe's model and data into the cache, and print their size")
    verb.add_argument("recipe", type=Path, help=RECIPE)
    verb.set_defaults(func=_fetch)


def _fetch(arguments: argparse.Namespace) -> int:
    from zero_recipes.config import recipe as recipes
    from zero_recipes.core import units
    from zero_recipes.data.load import fetch

    mapping = recipes.read_recipe_file(arguments.recipe)
    recipe = recipes.parse_recipe(arguments.recipe, mapping, [])
    for name, size in fetch(recipe.settings):
        print(name if size is None else f"{name}: {units.size(size)}")
    return 0


def add_plan(verbs) -> None:
    verb = subcommand(
        verbs,
        "plan",
        "memory, time and cost of each strategy before a GPU is rented; other options override the recipe's keys",
    )
    verb.add_argument("recipe", type=Path, help=RECIPE)
    verb.add_argument(
        "--gpus", required=True, help="how many; several by comma (1,2,4,8): the smallest machine is looked for"
    )
    verb.add_argument("--gpu", required=True, help="which, e.g. h100-80gb; docs/commands.md lists all")
    add_strategies(verb, "the stages and CPU offload")
    verb.add_argument(
        "--gpus_per_node",
        type=above_zero(int),
        default=8,
        help="GPUs of one machine at most; default: %(default)s",
    )
    verb.add_argument(
        "--host_memory",
        type=above_zero(float),
        help="of each machine in GB: what needs more does not fit; default: no limit",
    )
    verb.add_argument("--nvme", type=above_zero(float), help="disk of each machine in GB, for Infinity to swap to")
    verb.add_argument(
        "--network",
        type=above_zero(float),
        help="between machines, GB/s for each GPU (400 Gb/s are 50); default: of the hardware table",
    )
    verb.add_argument("--quick", action="store_true", help="textbook formulas instead of the engine")
    verb.add_argument("--max", action="store_true", help="the largest micro batch and the longest sequences that fit")
    verb.add_argument(
        "--price", type=above_zero(float), help="of one GPU for one hour, on demand or spot: what a run costs"
    )
    verb.add_argument(
        "--mean_tokens",
        type=above_zero(float),
        help="tokens of a training row on average, for time and price where data or tokenizer are not at hand",
    )
    verb.add_argument("--calibrate", type=Path, help="metrics.json of a run of this recipe on this GPU: its speed")
    verb.add_argument(
        "--hardware", type=Path, help="a YAML file with further GPUs, in the form of zero_recipes/core/hardware.yaml"
    )
    verb.add_argument("--output_dir", type=Path, help="write plan.json, plan.md and plan.png there")
    verb.add_argument("--json", action="store_true", help="print JSON alone")
    verb.set_defaults(func=_plan, overrides=[])


def _plan(arguments: argparse.Namespace) -> int:
    from zero_recipes.libs.warnings import quieten

    quieten()
    from zero_recipes.plan import command

    strategies = strategies_of(arguments)
    arguments.strategies = strategies and ",".join(strategies)
    return command.run(arguments, arguments.overrides)


def add_sweep(verbs) -> None:
    verb = subcommand(
        verbs, "sweep", "one strategy or value after another, measured; other options override the recipe's keys"
    )
    verb.add_argument("recipe", type=Path, help=RECIPE)
    add_strategies(verb, DEFAULT_STRATEGIES)
    verb.add_argument(
        "--num_processes",
        type=above_zero(int),
        default=2,
        help="processes of each run, one a GPU; default: %(default)s",
    )
    verb.add_argument("--output_dir", type=Path, help="for the runs; default: output/<recipe>-sweep")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=a,b,c",
        help="a run for each value of a key of the recipe, or of the ds_config by its path "
        "(zero_optimization.reduce_bucket_size=5e7,5e8); several: all combinations",
    )
    verb.set_defaults(func=_sweep, overrides=[])


def _sweep(arguments: argparse.Namespace) -> int:
    from zero_recipes.cli.sweep import all_strategies, sweep

    output_dir = arguments.output_dir or Path("output") / f"{arguments.recipe.stem}-sweep"
    strategies = strategies_of(arguments) or names(DEFAULT_STRATEGIES)
    everything = strategies == ["all"]
    strategies = all_strategies() if everything else strategies
    requested = (arguments.recipe, strategies, arguments.num_processes, output_dir, arguments.overrides)
    ended = [outcome.status for outcome in sweep(*requested, sets=arguments.sets)]
    print(f"zero-recipes report {output_dir}")
    # where values or all strategies are tried, what cannot run here is an answer too
    fine = ("ok", "refused") if everything or (arguments.sets and "ok" in ended) else ("ok",)
    return 0 if all(status in fine for status in ended) else 1


def add_report(verbs) -> None:
    verb = subcommand(verbs, "report", "table, plots, judgement and one HTML page from measured runs")
    verb.add_argument("folder", type=Path, help="of a sweep or a run, e.g. output/pythia-sweep")
    verb.set_defaults(func=_report)


def _report(arguments: argparse.Namespace) -> int:
    from zero_recipes.report import write_report

    print(f"report: {write_report(arguments.folder)}")
    return 0


def add_verify(verbs) -> None:
    verb = subcommand(verbs, "verify", "check that a saved model, adapter or checkpoint is whole")
    verb.add_argument("folder", type=Path, help="e.g. output/pythia, or output/pythia/checkpoint-500")
    verb.add_argument("--deep", action="store_true", help="read the numbers too: NaN, infinite, all zero")
    verb.add_argument("--skip_checksums", action="store_true", help="do not read the files to compare their checksums")
    verb.add_argument("--trust_remote_code", action="store_true", help="run the code that the model brings with it")
    verb.set_defaults(func=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from zero_recipes.checkpoint.saved_model import NotWhole
    from zero_recipes.checkpoint.verify import verify

    try:
        whole = verify(arguments.folder, arguments.deep, arguments.skip_checksums, arguments.trust_remote_code)
    except NotWhole as error:
        print(error, file=sys.stderr)
        return 1
    print(*(f"note: {note}" for note in whole["notes"]), sep="\n", end="\n" if whole["notes"] else "")
    print(
        f"{arguments.folder}: whole, {whole['tensors']} tensors, {whole['parameters']:,} parameters, "
        f"{whole['bytes']:,} bytes"
    )
    return 0


def add_reshard(verbs) -> None:
    verb = subcommand(verbs, "reshard", "a checkpoint for another ZeRO stage and number of processes")
    verb.add_argument("checkpoint", type=Path, help="e.g. output/pythia/checkpoint-500; it stays as it is")
    verb.add_argument("--world_size", type=above_zero(int), required=True, help="processes of the run to come")
    verb.add_argument("--stage", type=int, choices=(1, 2, 3), required=True, help="its ZeRO stage")
    verb.add_argument("--skip_checksums", action="store_true", help="neither compare nor write checksums")
    verb.add_argument(
        "--trust_checkpoint",
        action="store_true",
        help="load it also where its pickles hold more than data: they may run any program",
    )
    verb.set_defaults(func=_reshard)


def _reshard(arguments: argparse.Namespace) -> int:
    from zero_recipes.libs.warnings import quieten

    quieten()
    from zero_recipes.checkpoint import manifest
    from zero_recipes.checkpoint.reshard.write import reshard, resume_command

    asked = (arguments.checkpoint, arguments.world_size, arguments.stage)
    folder, batch = reshard(*asked, arguments.skip_checksums, arguments.trust_checkpoint)
    print(f"written: {folder}", f"global batch kept: {batch.total} sequences ({batch})", sep="\n")
    print(f"go on with:\n{resume_command(folder, batch, manifest.read(folder)['strategy'])}")
    return 0


def add_meet(verbs) -> None:
    verb = subcommand(verbs, "meet", "several machines find each other, or say who is missing; before a launch")
    verb.add_argument(
        "--hosts", type=names, required=True, help="names or addresses of all machines by comma, by machine rank"
    )
    verb.add_argument("--machine_rank", type=int, required=True, help="which of them this machine is, from 0")
    verb.add_argument("--port", type=above_zero(int), default=29501, help="of the first machine, open to the others")
    verb.add_argument("--seconds", type=above_zero(float), default=60.0, help="how long to wait")
    verb.set_defaults(func=_meet)


def _meet(arguments: argparse.Namespace) -> int:
    from zero_recipes.distributed.group import wait_for_hosts

    hosts = arguments.hosts
    met = wait_for_hosts(hosts, arguments.machine_rank, arguments.port, arguments.seconds)
    listed = ", ".join(f"{rank}: {name} ({host})" for rank, (name, host) in enumerate(zip(met, hosts, strict=True)))
    print(f"{len(met)} machines have met: {listed}")
    return 0
