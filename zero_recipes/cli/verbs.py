"""The verbs that a few lines hand on to their package: the parser of each, and what it prints.

What a verb needs is imported where it runs: `zero-recipes --help` need not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from zero_recipes.cli.options import AMOUNT, COUNT, OVERRIDES, RECIPE, add_strategies, names, strategies_of, subcommand
from zero_recipes.core import units
from zero_recipes.core.findings import AREAS, REFUSED, described, first_line, library_error_as_finding, table

DEFAULT_STRATEGIES = "ddp,zero0,zero1,zero2,zero3"


def add_fetch(verbs) -> None:
    verb = subcommand(verbs, "fetch", "download a recipe's model and data into the cache, and print their size")
    verb.add_argument("recipe", type=Path, help=RECIPE)
    verb.set_defaults(func=_fetch)


def _fetch(arguments: argparse.Namespace) -> int:
    """Local folders are only measured. Raises Refusal where the hub cannot be reached or does not have it."""
    from zero_recipes.config import recipe as recipes
    from zero_recipes.data.load import load_splits

    mapping = recipes.read_recipe_file(arguments.recipe)
    settings = recipes.parse_recipe(arguments.recipe, mapping, []).settings
    model = fetch_model(settings)
    print(f"{settings.model_name_or_path}: {units.size(_bytes_in(model.rglob('*')))}")
    files = {file["filename"] for split in load_splits(settings).values() for file in split.cache_files}
    named = settings.dataset_name or ", ".join(entry["path"] for entry in settings.datasets)
    print(f"{named}: {units.size(_bytes_in(map(Path, files)))}")
    fetch_kernel(settings.attn_implementation)
    return 0


def fetch_model(settings) -> Path:
    """The folder of configuration, tokenizer and weights: safetensors, or *.bin in repositories that have none."""
    from huggingface_hub import HfApi, snapshot_download

    name, revision = str(settings.model_name_or_path), settings.model_revision
    if Path(name).is_dir():
        return Path(name)
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
    with library_error_as_finding(f"downloading the model {name}"):
        if not settings.random_weights:
            files = HfApi().list_repo_files(name, revision=revision)
            patterns.append("*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin")
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def fetch_kernel(attn_implementation: str | None) -> None:
    """Flash attention's build for this machine's torch: one fetched without a GPU is none of a machine with one."""
    from zero_recipes.libs.huggingface import attention_name, kernel_version

    kernel = attention_name(attn_implementation)
    if kernel is None or "/" not in kernel:  # an installed package, or torch's own
        return
    repository, _, revision = kernel.partition(":")[0].partition("@")  # of "owner/name@revision:function"
    try:
        from kernels import install_kernel

        folder = Path(install_kernel(repository, revision=revision or kernel_version(repository)))
        print(f"{kernel}: {units.size(_bytes_in(folder.rglob('*')))}")
    except Exception as error:  # of kernels, huggingface_hub and the network, of many kinds
        print(f"{kernel} is not fetched: {first_line(error)}")


def _bytes_in(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def add_plan(verbs) -> None:
    verb = subcommand(verbs, "plan", f"memory, time and cost of each strategy before a GPU is rented; {OVERRIDES}")
    verb.add_argument("recipe", type=Path, help=RECIPE)
    verb.add_argument("--gpus", required=True, help="how many; of several by comma (1,2,4,8) the smallest that fits")
    verb.add_argument("--gpu", required=True, help="which, e.g. h100-80gb; docs/commands.md lists all")
    add_strategies(verb, "the stages and CPU offload")
    verb.add_argument("--gpus_per_node", type=COUNT, default=8, help="GPUs of a machine at most; default: %(default)s")
    verb.add_argument("--host_memory", type=AMOUNT, help="of each machine in GB; default: no limit")
    verb.add_argument("--nvme", type=AMOUNT, help="disk of each machine in GB, for Infinity to swap to")
    network = "between machines, GB/s for each GPU (400 Gb/s are 50); default: of the hardware table"
    verb.add_argument("--network", type=AMOUNT, help=network)
    verb.add_argument("--quick", action="store_true", help="textbook formulas instead of the engine")
    verb.add_argument("--max", action="store_true", help="the largest micro batch and the longest sequences that fit")
    verb.add_argument("--price", type=AMOUNT, help="of one GPU for one hour, on demand or spot: what a run costs")
    verb.add_argument("--mean_tokens", type=AMOUNT, help="tokens of a training row, where the data is not at hand")
    verb.add_argument("--calibrate", type=Path, help="metrics.json of a run of this recipe on this GPU: its speed")
    verb.add_argument("--hardware", type=Path, help="further GPUs, in the form of zero_recipes/core/hardware.yaml")
    verb.add_argument("--output_dir", type=Path, help="write plan.json, plan.txt and plan.png there")
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
    verb = subcommand(verbs, "sweep", f"one strategy or value after another, measured; {OVERRIDES}")
    verb.add_argument("recipe", type=Path, help=RECIPE)
    add_strategies(verb, DEFAULT_STRATEGIES)
    processes = "processes of each run, one a GPU; default: %(default)s"
    verb.add_argument("--num_processes", type=COUNT, default=2, help=processes)
    verb.add_argument("--output_dir", type=Path, help="for the runs; default: output/<recipe>-sweep")
    values = "a run for each value of a key of the recipe, or of the ds_config by its path; several: all combinations"
    verb.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=a,b,c", help=values)
    verb.set_defaults(func=_sweep, overrides=[])


def _sweep(arguments: argparse.Namespace) -> int:
    from zero_recipes.cli.sweep import all_strategies, sweep

    output_dir = arguments.output_dir or Path("output") / f"{arguments.recipe.stem}-sweep"
    strategies = strategies_of(arguments) or names(DEFAULT_STRATEGIES)
    everything = strategies == ["all"]
    strategies = all_strategies() if everything else strategies
    processes, overrides = arguments.num_processes, arguments.overrides
    outcomes = sweep(arguments.recipe, strategies, processes, output_dir, overrides, sets=arguments.sets)
    ended = [outcome.status for outcome in outcomes]
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
    from zero_recipes.checkpoint.save import NotWhole
    from zero_recipes.checkpoint.verify import verify

    try:
        whole = verify(arguments.folder, arguments.deep, arguments.skip_checksums, arguments.trust_remote_code)
    except NotWhole as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{arguments.folder}: whole, {whole['tensors']} tensors, {whole['parameters']:,} parameters, "
        f"{whole['bytes']:,} bytes"
    )
    return 0


def add_reshard(verbs) -> None:
    verb = subcommand(verbs, "reshard", "a checkpoint for another ZeRO stage and number of processes")
    verb.add_argument("checkpoint", type=Path, help="e.g. output/pythia/checkpoint-500; it stays as it is")
    verb.add_argument("--world_size", type=COUNT, required=True, help="processes of the run to come")
    verb.add_argument("--stage", type=int, choices=(1, 2, 3), required=True, help="its ZeRO stage")
    verb.add_argument("--skip_checksums", action="store_true", help="neither compare nor write checksums")
    trust = "load it also where its pickles hold more than data: they may run any program"
    verb.add_argument("--trust_checkpoint", action="store_true", help=trust)
    verb.set_defaults(func=_reshard)


def _reshard(arguments: argparse.Namespace) -> int:
    from zero_recipes.libs.warnings import quieten

    quieten()
    from zero_recipes.checkpoint.reshard import reshard, resume_command
    from zero_recipes.checkpoint.save import read_manifest

    to = (arguments.world_size, arguments.stage)
    folder, batch = reshard(arguments.checkpoint, *to, arguments.skip_checksums, arguments.trust_checkpoint)
    print(f"written: {folder}", f"global batch kept: {batch.total} sequences ({batch})", sep="\n")
    print(f"go on with:\n{resume_command(folder, batch, read_manifest(folder)['strategy'])}")
    return 0


def add_meet(verbs) -> None:
    verb = subcommand(verbs, "meet", "several machines find each other, or say who is missing; before a launch")
    verb.add_argument("--hosts", type=names, required=True, help="all machines by comma, by machine rank")
    verb.add_argument("--machine_rank", type=int, required=True, help="which of them this machine is, from 0")
    verb.add_argument("--port", type=COUNT, default=29501, help="of the first machine, open to the others")
    verb.add_argument("--seconds", type=AMOUNT, default=60.0, help="how long to wait")
    verb.set_defaults(func=_meet)


def _meet(arguments: argparse.Namespace) -> int:
    from zero_recipes.distributed.group import wait_for_hosts

    wait_for_hosts(arguments.hosts, arguments.machine_rank, arguments.port, arguments.seconds)
    print(f"{len(arguments.hosts)} machines have met: {', '.join(arguments.hosts)}")
    return 0


def add_ask(verbs) -> None:
    text = "a saved model beside its base on the same prompts, scored; or a conversation with it"
    verb = subcommand(verbs, "ask", f"{text}; {OVERRIDES}")
    verb.add_argument("model", type=Path, help="a run's output_dir, a checkpoint-N, a model or a PEFT adapter")
    verb.add_argument("--base", help="folder or name; default: of the run's recipe or the adapter; none: no base")
    either = verb.add_mutually_exclusive_group()
    prompts = "rows as JSON Lines, or a prompt a line; default: the recipe's sample_prompts"
    either.add_argument("--prompts", type=Path, help=prompts)
    either.add_argument("--chat", action="store_true", help="talk to it; with --base to both")
    longest = "longest answer in tokens; default: the recipe's sample_max_new_tokens, 256 in a conversation"
    verb.add_argument("--max_new_tokens", type=COUNT, help=longest)
    verb.add_argument("--output_dir", type=Path, help="for samples.jsonl; default: output/ask-<model>")
    verb.add_argument("--trust_remote_code", action="store_true", help="run the code that the model brings with it")
    verb.set_defaults(func=_ask, overrides=[])


def _ask(arguments: argparse.Namespace) -> int:
    from zero_recipes.libs.warnings import quieten

    quieten()
    from zero_recipes.ask import run

    return run(arguments, arguments.overrides)


def add_explain(verbs) -> None:
    verb = subcommand(verbs, "explain", "what a finding's code means; without a code: the areas of all codes")
    verb.add_argument("code", nargs="?", help="e.g. ZR104")
    verb.set_defaults(func=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    code = (arguments.code or "").upper()
    if not code:
        counts = Counter(AREAS[code[2]] for code in table())
        print(*(f"ZR{digit}xx  {area}: {counts[area]} codes" for digit, area in AREAS.items()), sep="\n")
        print("All of them: docs/codes.md. One: zero-recipes explain ZR104")
        return 0
    if code not in table():
        near = ", ".join(get_close_matches(code, table())) or "none"
        print(f"there is no code {code}; near it: {near}", file=sys.stderr)
        return REFUSED
    row = described(code)
    print(f"{code} ({row['area']}, {row['level']}): {row['what']}", f"    why: {row['why']}", sep="\n")
    print(f"    fix: {row['fix']}")
    if "ignore" in row:
        print(f"    --ignore {code} makes it a warning: {row['ignore']}")
    elif row["level"] != "warning":
        print("    --ignore does not take it: the run would stop, or be wrong")
    if "example" in row:
        print("", "example:", *(f"    {line}" for line in row["example"].splitlines()), sep="\n")
    return 0
