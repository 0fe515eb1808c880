"""zero-recipes: the verbs around run_sft.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zero_recipes.compat.warnings import quieten_loggers
from zero_recipes.core.errors import Refusal, print_refusal

DEFAULT_STRATEGIES = "ddp,zero0,zero1,zero2,zero3"


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0 done, 1 a run or a check failed, 2 refused."""
    parser = argparse.ArgumentParser(prog="zero-recipes", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    verb = verbs.add_parser("fetch", help="download a recipe's model and data once")
    verb.add_argument("recipe", type=Path)

    verb = verbs.add_parser(
        "check", help="all findings about a run, before it costs money; unknown options are overrides"
    )
    verb.add_argument("recipe", type=Path)
    verb.add_argument("--config_file", type=Path, help="the accelerate file it will be launched with")
    verb.add_argument("--num_processes", type=int)
    verb.add_argument(
        "--upgrade", action="store_true", help="write RECIPE.upgraded.yaml in today's keys, and check that"
    )
    verb.add_argument(
        "--data", action="store_true", help="tokenise the training rows, count and show what is supervised"
    )
    verb.add_argument("--show", action="store_true", help="print the DeepSpeed configuration that will be used")

    verb = verbs.add_parser(
        "plan", help="memory, time and cost of each strategy before a GPU is rented", allow_abbrev=False
    )
    verb.add_argument("recipe", type=Path)
    verb.add_argument("--gpus", required=True, help="how many; several by comma: the smallest machine is looked for")
    verb.add_argument("--gpu", required=True, help="which, e.g. h100-80gb (zero_recipes/planner/hardware.yaml)")
    verb.add_argument("--strategies", help="names of accelerate_configs/*.yaml, by comma; default: all")
    verb.add_argument("--gpus_per_node", type=int, default=8, help="at most; default: %(default)s")
    verb.add_argument("--host_memory", type=float, help="of each machine in GB: what needs more of it does not fit")
    verb.add_argument("--quick", action="store_true", help="textbook formulas instead of the engine")
    verb.add_argument("--max", action="store_true", help="the largest micro batch and the longest sequences that fit")
    verb.add_argument("--price", type=float, help="of one GPU for one hour: what a run costs")
    verb.add_argument("--calibrate", type=Path, help="metrics.json of a run of this recipe on this GPU: its speed")
    verb.add_argument("--hardware", type=Path, help="a YAML file with further GPUs")
    verb.add_argument("--output_dir", type=Path, help="write plan.json, plan.md and plan.png there")
    verb.add_argument("--json", action="store_true", help="print JSON alone")

    verb = verbs.add_parser("sweep", help="one strategy after another, measured; unknown options go to run_sft.py")
    verb.add_argument("recipe", type=Path)
    verb.add_argument(
        "--strategies", default=DEFAULT_STRATEGIES, help="names of accelerate_configs/*.yaml, by comma; or: all"
    )
    verb.add_argument("--num_processes", type=int, default=2)
    verb.add_argument("--output_dir", type=Path, help="default: output/<recipe>-sweep")

    verb = verbs.add_parser("report", help="table, plots, judgement and one HTML page from measured runs")
    verb.add_argument("folder", type=Path)

    verb = verbs.add_parser("verify", help="check that a saved model or adapter is whole")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--deep", action="store_true", help="read the numbers too: NaN, infinite, all zero")

    verb = verbs.add_parser("reshard", help="a checkpoint for another ZeRO stage and number of processes")
    verb.add_argument("checkpoint", type=Path)
    verb.add_argument("--world_size", type=int, required=True, help="processes of the run to come")
    verb.add_argument("--stage", type=int, required=True, help="its ZeRO stage: 1, 2 or 3")

    verb = verbs.add_parser("meet", help="several machines find each other, or say who is missing; before a launch")
    verb.add_argument("--hosts", required=True, help="names or addresses of all machines by comma, by machine rank")
    verb.add_argument("--machine_rank", type=int, required=True, help="which of them this machine is, from 0")
    verb.add_argument("--port", type=int, help="of the first machine, open to the others; default: 29501")
    verb.add_argument("--seconds", type=float, help="how long to wait; default: 60")

    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.verb not in ("sweep", "check", "plan"):
        parser.error(f"unknown: {' '.join(rest)}")
    run_verb = {
        "fetch": _fetch,
        "check": _check,
        "plan": _plan,
        "sweep": _sweep,
        "report": _report,
        "verify": _verify,
        "reshard": _reshard,
        "meet": _meet,
    }[arguments.verb]
    quieten_loggers()
    try:
        return run_verb(arguments, rest)
    except Refusal as refusal:
        return print_refusal(refusal)


def _fetch(arguments: argparse.Namespace, _rest: list[str]) -> int:
    from zero_recipes.config import recipe as recipes
    from zero_recipes.core import units
    from zero_recipes.data.download import fetch

    mapping = recipes.read(arguments.recipe)
    recipe = recipes.parse(arguments.recipe, mapping, [])
    for name, size in fetch(recipe.settings):
        print(f"{name}: {units.size(size)}")
    return 0


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    import json

    from zero_recipes.checks.preflight import preflight, resolved_ds_config
    from zero_recipes.compat import warnings as calm
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config.accelerate import launched_environment
    from zero_recipes.planner import gate

    calm.quieten()
    if arguments.upgrade:
        arguments.recipe = _write_upgraded(arguments.recipe)
    mapping = recipes.read(arguments.recipe)
    environment = launched_environment(arguments.config_file, arguments.num_processes)
    run, findings = preflight(arguments.recipe, mapping, rest, environment, rehearsal=True)
    if run is not None:
        findings += gate.rehearsed(run, environment)
        print("\n".join(run.strategy.described(run.device, run.settings)))
        if arguments.show:
            print(json.dumps(resolved_ds_config(run), indent=2) if run.strategy.is_deepspeed else "no DeepSpeed")
        if arguments.data:
            findings += data_findings(run, show=True)
    print(*findings, sep="\n", end="\n" if findings else "")
    errors = sum(finding.level == "error" for finding in findings)
    print(f"{errors} errors, {len(findings) - errors} warnings")
    return 2 if errors else 0


def data_findings(run, show: bool) -> list:
    """What the audit of the training rows finds; their counts and three of them printed, if asked.

    Raises Refusal where data, splits or sample prompts cannot be had.
    """
    from zero_recipes.config import recipe as recipes
    from zero_recipes.data import audit, prepare, samples
    from zero_recipes.data import load as data

    # neither weights nor ranks: the strategy does not matter to the data
    settings = run.settings.replace(deepspeed=None, use_cpu=True, bf16=False, fp16=False)
    script_args, training_args, model_args, dataset_args, ours = recipes.instances(settings, run.recipe.path)
    tokenizer = prepare.dress(data.load_tokenizer(model_args, training_args), training_args)
    rows, evaluation = data.load_rows(script_args, training_args, dataset_args, ours.dataset_format)
    samples.choose_samples(ours.sample_prompts, evaluation, ours.dataset_format, tokenizer)
    packing = training_args.packing
    tokenised, _, found, findings = prepare.prepare_split(rows, tokenizer, training_args, packing, skips=False)
    if show:
        audit.show(found, tokenised, tokenizer, training_args)
    return findings


def _write_upgraded(old: Path) -> Path:
    from zero_recipes.cli.upgrade import upgrade

    text, said = upgrade(old)
    new = old.with_suffix(".upgraded.yaml")
    if new.exists() and new.read_text() != text:
        raise Refusal(
            "ZR127", f"{new} exists already", "It differs from what would be written.", "Move it, or delete it."
        )
    new.write_text(text)
    print(*said, f"written: {new}", sep="\n")
    return new


def _plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    from zero_recipes.compat import warnings as calm

    calm.quieten()
    from zero_recipes.planner import cli as command

    return command.run(arguments, rest)


def _sweep(arguments: argparse.Namespace, rest: list[str]) -> int:
    from zero_recipes.cli.sweep import all_strategies, sweep

    output_dir = arguments.output_dir or Path("output") / f"{arguments.recipe.stem}-sweep"
    strategies = [name.strip() for name in arguments.strategies.split(",") if name.strip()]
    everything = strategies == ["all"]
    strategies = all_strategies() if everything else strategies
    outcomes = sweep(arguments.recipe, strategies, arguments.num_processes, output_dir, rest)
    print(f"zero-recipes report {output_dir}")
    fine = ("ok", "refused") if everything else ("ok",)  # all: what cannot run here is an answer too
    return 0 if all(outcome.status in fine for outcome in outcomes) else 1


def _report(arguments: argparse.Namespace, _rest: list[str]) -> int:
    from zero_recipes.report import write_report

    print(f"report: {write_report(arguments.folder)}")
    return 0


def _meet(arguments: argparse.Namespace, _rest: list[str]) -> int:
    from zero_recipes.distributed.wait_for_hosts import PORT, SECONDS, meet_machines

    hosts = [host.strip() for host in arguments.hosts.split(",")]
    names = meet_machines(hosts, arguments.machine_rank, arguments.port or PORT, arguments.seconds or SECONDS)
    listed = ", ".join(f"{rank}: {name} ({host})" for rank, (name, host) in enumerate(zip(names, hosts, strict=True)))
    print(f"{len(names)} machines have met: {listed}")
    return 0


def _verify(arguments: argparse.Namespace, _rest: list[str]) -> int:
    from zero_recipes.checkpoint.verify import NotWhole, verify

    try:
        whole = verify(arguments.folder, arguments.deep)
    except NotWhole as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{arguments.folder}: whole, {whole['tensors']} tensors, {whole['parameters']:,} parameters, "
        f"{whole['bytes']:,} bytes"
    )
    return 0


def _reshard(arguments: argparse.Namespace, _rest: list[str]) -> int:
    from zero_recipes.compat import warnings as calm

    calm.quieten()
    from zero_recipes.checkpoint import manifest
    from zero_recipes.checkpoint.reshard.write import reshard, resume_command

    folder, batch = reshard(arguments.checkpoint, arguments.world_size, arguments.stage)
    print(f"written: {folder}", f"global batch kept: {batch.total} sequences ({batch})", sep="\n")
    print(f"go on with:\n{resume_command(folder, batch, manifest.read(folder)['strategy'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
