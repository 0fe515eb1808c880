"""The command line of zero-recipes: every subcommand with its options, and the types that they share."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from zero_recipes.core.files import at_hand
from zero_recipes.tools import check, env, import_config, train, verbs

Func = Callable[[argparse.Namespace], int]  # runs a subcommand and returns the exit code


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """argparse's `type` for a number above zero."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return number


COUNT = above_zero(int)
AMOUNT = above_zero(float)


def recipe_file(text: str) -> Path:
    return at_hand(text, "recipes")


def accelerate_file(text: str) -> Path:
    return at_hand(text, "accelerate_configs")


def names(text: str) -> list[str]:
    """argparse's `type` for names by comma."""
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return listed


def parse_arguments(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """The subcommand's arguments, with `func` that runs it and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="zero-recipes",
        description=description,
        epilog="For options, run zero-recipes SUBCOMMAND --help. See also docs/commands.md.",
    )
    subcommands = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")
    # --help lists them in this order
    add_launches(subcommands)
    add_check(subcommands)
    add_import(subcommands)
    add_plans(subcommands)
    add_measurements(subcommands)
    add_results(subcommands)
    add_reshard(subcommands)
    add_explain(subcommands)

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


def add_verb(subcommands, func: Func, text: str, overrides: bool = False) -> argparse.ArgumentParser:
    """`text` is in both --helps. `overrides`: unknown options override the recipe's keys.

    Options are taken by their whole names alone: `--num_proc` may be a key of the recipe, not `--num_processes`.
    """
    if overrides:
        text += "; other options override the recipe's keys"
    verb = subcommands.add_parser(
        func.__name__.strip("_"),
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        allow_abbrev=False,
    )
    verb.set_defaults(func=func)
    if overrides:
        verb.set_defaults(overrides=[])
    return verb


def add_recipe(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "recipe",
        type=recipe_file,
        help="a recipe, e.g. recipes/pythia.yaml, or pythia.yaml for the one in the package",
    )


def add_recipe_verb(subcommands, func: Func, text: str) -> argparse.ArgumentParser:
    verb = add_verb(subcommands, func, text, overrides=True)
    add_recipe(verb)
    return verb


def add_launches(subcommands) -> None:
    verb = add_verb(
        subcommands,
        train.init,
        "copy recipes, ds_configs, accelerate_configs, run_sft.py and the demo's data for editing",
    )
    verb.add_argument("folder", type=Path, nargs="?", default=Path(), help="default: the current folder")

    verb = add_recipe_verb(
        subcommands,
        train.train,
        "run a recipe on all GPUs of this machine with accelerate's launcher",
    )
    verb.add_argument(
        "--config_file",
        type=accelerate_file,
        help="e.g. zero3.yaml; default: the recipe's, or ddp.yaml",
    )
    verb.add_argument(
        "--num_processes",
        type=COUNT,
        help="on all machines; default: one per GPU, 1 without GPUs",
    )
    verb.add_argument(
        "--hosts",
        type=names,
        help="all machines, comma-separated; run the command on each",
    )
    verb.add_argument("--machine_rank", type=int, default=0, help="rank of this machine, from 0")

    verb = add_verb(
        subcommands,
        verbs.fetch,
        "download a recipe's model and data into the cache, and print their size",
    )
    add_recipe(verb)


def add_check(subcommands) -> None:
    verb = add_recipe_verb(
        subcommands,
        check.check,
        "print every problem with its cause and fix, before you pay for a GPU",
    )
    verb.add_argument(
        "--config_file",
        type=accelerate_file,
        help="the accelerate file of the launch, e.g. zero3.yaml",
    )
    verb.add_argument(
        "--num_processes",
        type=COUNT,
        help="processes, one per GPU; default: the accelerate file's",
    )
    verb.add_argument("--gpu", help="check for this GPU instead of this machine, e.g. h100-80gb; names as in plan")
    verb.add_argument(
        "--data",
        action="store_true",
        help="tokenize the rows, count supervised tokens, show three rows",
    )
    verb.add_argument("--show", action="store_true", help='print the ds_config with every "auto" filled in')
    verb.add_argument("--traceback", action="store_true", help="show where a library raised its error")


def add_import(subcommands) -> None:
    verb = add_verb(
        subcommands,
        import_config.import_,
        "convert an axolotl, LLaMA-Factory or torchtune file to a recipe, and list what has no counterpart",
    )
    verb.add_argument("file", type=Path, help="the YAML file that the other trainer reads")
    verb.add_argument(
        "--output",
        type=Path,
        help="file for the recipe; default: FILE.recipe.yaml in this folder",
    )
    verb.add_argument(
        "--allow",
        type=names,
        help="comma-separated keys to leave out, although the training differs",
    )


def add_plans(subcommands) -> None:
    verb = add_recipe_verb(
        subcommands,
        verbs.plan,
        "compute memory, time and cost of each strategy before you rent a GPU",
    )
    verb.add_argument(
        "--params",
        type=AMOUNT,
        help="plan a Llama-like model of this size instead of a recipe, e.g. 7e9; "
        "bf16, micro batches of 1 x 2,048 tokens",
    )
    add_machines(verb)
    verb.add_argument(
        "--max",
        action="store_true",
        help="find the largest micro batch and longest sequences that fit",
    )
    verb.add_argument("-v", "--verbose", action="store_true", help="also print parts, phases and caveats")
    verb.add_argument("--json", action="store_true", help="print only JSON")

    verb = add_recipe_verb(
        subcommands,
        verbs.rent,
        "write job files for SkyPilot, SLURM and Kubernetes with the plan's recommendation",
    )
    add_machines(verb)
    verb.add_argument(
        "--image",
        default="zero-recipes",
        help="pushed image, for Kubernetes; default: %(default)s",
    )
    verb.add_argument(
        "--output_dir",
        type=Path,
        default=Path(),
        help="folder for the files; default: the current one",
    )
    verb.set_defaults(params=None, max=False)


def add_machines(verb: argparse.ArgumentParser) -> None:
    """What a plan is made for."""
    verb.add_argument(
        "--gpus",
        required=True,
        help="number of GPUs; of a list (1,2,4,8), the smallest that fits",
    )
    verb.add_argument(
        "--gpu",
        default="h100-80gb",
        help="GPU type; docs/commands.md lists all; default: %(default)s",
    )
    add_strategies(verb, "the stages and CPU offload")
    verb.add_argument(
        "--gpus_per_node",
        type=COUNT,
        default=8,
        help="maximum GPUs per machine; default: %(default)s",
    )
    verb.add_argument("--host_memory", type=AMOUNT, help="host memory of each machine in GB; default: no limit")
    verb.add_argument("--nvme", type=AMOUNT, help="NVMe disk of each machine in GB, for ZeRO-Infinity")
    verb.add_argument("--network", type=AMOUNT, help="GB/s between machines per GPU (400 Gb/s is 50)")
    verb.add_argument("--quick", action="store_true", help="use formulas instead of the simulated engine")
    verb.add_argument("--price", type=AMOUNT, help="price per GPU-hour; prints the price of the run")
    verb.add_argument("--mean_tokens", type=AMOUNT, help="mean tokens per row, if the data is not on this machine")
    verb.add_argument("--hardware", type=Path, help="file with more GPUs, like zero_recipes/core/hardware.yaml")


def add_strategies(verb: argparse.ArgumentParser, default: str) -> None:
    verb.add_argument("--strategies", type=names, help=f"comma-separated names, or all; default: {default}")


def add_measurements(subcommands) -> None:
    add_verb(subcommands, env.env, "print this machine's GPUs, driver, memory, disks and versions")

    verb = add_recipe_verb(
        subcommands,
        verbs.sweep,
        "run and measure several strategies or values, one after another",
    )
    add_strategies(verb, ",".join(verbs.STAGES))
    verb.add_argument("--num_processes", type=COUNT, default=2, help="processes per run; default: %(default)s")
    verb.add_argument(
        "--output_dir",
        type=Path,
        help="folder for the runs; default: output/<recipe>-sweep",
    )
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=a,b,c",
        help="one run per value of a recipe key, or of a ds_config key by its path; repeat it for all combinations",
    )

    verb = add_recipe_verb(
        subcommands,
        verbs.tune,
        "find the fastest settings on this machine and write RECIPE.tuned.yaml",
    )
    verb.add_argument("--minutes", type=AMOUNT, default=10.0, help="how long to measure; default: %(default)g")
    verb.add_argument(
        "--num_processes",
        type=COUNT,
        help="processes per run; default: one per GPU, 2 without GPUs",
    )
    verb.add_argument(
        "--strategies",
        type=names,
        help="default: ddp and stages 1 to 3, or offload if none fits",
    )
    verb.add_argument(
        "--output_dir",
        type=Path,
        help="folder for the runs; default: output/<recipe>-tune",
    )


def add_results(subcommands) -> None:
    """What reads a finished run."""
    verb = add_verb(
        subcommands,
        verbs.report,
        "recommend a strategy from measured runs; write tables, plots and one HTML page",
    )
    verb.add_argument("folder", type=Path, help="folder of a sweep or a run, e.g. output/pythia-sweep")

    verb = add_model_verb(
        subcommands,
        verbs.ask,
        "prompt a saved model and its base model with the same prompts and score both",
    )
    verb.add_argument(
        "--output_dir",
        type=Path,
        help="folder for samples.jsonl; default: output/ask-<model>",
    )

    verb = add_verb(subcommands, verbs.verify, "check that a saved model, adapter or checkpoint is complete")
    verb.add_argument("folder", type=Path, help="e.g. output/pythia, or output/pythia/checkpoint-500")
    verb.add_argument("--deep", action="store_true", help="also check for NaN, infinite and all-zero tensors")
    verb.add_argument("--skip_checksums", action="store_true", help="do not compare checksums")
    add_trust(verb)

    verb = add_model_verb(
        subcommands,
        verbs.export,
        "export a run's model, with LoRA merged, as safetensors, GGUF and an Ollama Modelfile",
    )
    verb.add_argument(
        "--gguf",
        nargs="+",
        default=[],
        choices=verbs.GGUF,
        help="file types for llama.cpp and Ollama",
    )
    verb.add_argument("--llama_cpp", type=Path, help="llama.cpp folder; default: download the pinned source")
    verb.add_argument("--output_dir", type=Path, help="default: <model>-export")

    verb = add_verb(
        subcommands,
        verbs.push,
        "upload a run's model, model card and measurements to the Hub, without local paths",
    )
    verb.add_argument("folder", type=Path, help="a run's output_dir, e.g. output/pythia")
    verb.add_argument("--hub_model_id", required=True, help="the repository, e.g. me/pythia-alpaca")
    verb.add_argument("--private", action="store_true", help="create it as a private repository")


def add_model_verb(subcommands, func: Func, text: str) -> argparse.ArgumentParser:
    verb = add_verb(subcommands, func, text, overrides=True)
    verb.add_argument(
        "model",
        type=Path,
        help="a run's output_dir, a checkpoint-N, a model or a PEFT adapter",
    )
    verb.add_argument(
        "--base",
        help="base model (folder, name or none); default: from the run or the adapter",
    )
    add_trust(verb)
    return verb


def add_trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--trust_remote_code", action="store_true", help="run the model's own code")


def add_reshard(subcommands) -> None:
    verb = add_verb(
        subcommands,
        verbs.reshard,
        "convert a checkpoint to another ZeRO stage and number of processes",
    )
    verb.add_argument(
        "checkpoint",
        type=Path,
        help="e.g. output/pythia/checkpoint-500; it is not changed",
    )
    verb.add_argument("--world_size", type=COUNT, required=True, help="processes of the next run")
    verb.add_argument("--stage", type=int, choices=(1, 2, 3), required=True, help="its ZeRO stage")
    verb.add_argument("--skip_checksums", action="store_true", help="do not compare or write checksums")
    verb.add_argument(
        "--trust_checkpoint",
        action="store_true",
        help="load pickles that can run arbitrary code",
    )


def add_explain(subcommands) -> None:
    verb = add_verb(subcommands, verbs.explain, "explain a code, with its cause, fix and an example")
    verb.add_argument("code", help="e.g. ZR104; docs/codes.md lists all")
