"""The subcommands of zero-recipes and their options."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_recipes.core.files import at_hand
from zero_recipes.tools import check, import_config, train, verbs

Func = Callable[[argparse.Namespace], int]  # runs a subcommand and returns the exit code
Add = Callable[..., Any]  # a subcommand's add_argument


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse `type`."""

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
    """An argparse `type`: comma-separated names."""
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return listed


def parse_arguments(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """`func` of the result runs the subcommand."""
    parser = argparse.ArgumentParser(
        prog="zero-recipes",
        description=description,
        epilog="For options, run zero-recipes SUBCOMMAND --help. See also docs/commands.md.",
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")
    # --help lists them in this order
    add_launches(commands)
    add_check(commands)
    add_import(commands)
    add_plans(commands)
    add_measurements(commands)
    add_results(commands)
    add_reshard(commands)
    add_explain(commands)

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


def add_verb(commands, func: Func, text: str, **defaults: Any) -> Add:
    """`text` is shown in both --helps.

    With `overrides`, unknown options override the recipe's keys.
    Names are never abbreviated: `--num_proc` may be a key of the recipe, not `--num_processes`.
    """
    if "overrides" in defaults:
        text += "; other options override the recipe's keys"
    verb = commands.add_parser(
        func.__name__.strip("_"),
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        allow_abbrev=False,
    )
    verb.set_defaults(func=func, **defaults)
    return verb.add_argument


def add_recipe_verb(commands, func: Func, text: str, **defaults: Any) -> Add:
    add = add_verb(commands, func, text, overrides=[], **defaults)
    add(
        "recipe",
        type=recipe_file,
        help="a recipe, e.g. recipes/pythia.yaml, or pythia.yaml for the one in the package",
    )
    return add


def add_launches(commands) -> None:
    add = add_verb(
        commands,
        train.init,
        "copy recipes, ds_configs, accelerate_configs, run_sft.py and the demo's data for editing",
    )
    add("folder", type=Path, nargs="?", default=Path(), help="default: the current folder")

    add = add_recipe_verb(
        commands,
        train.train,
        "run a recipe on all GPUs of this machine with accelerate's launcher",
    )
    add("--config_file", type=accelerate_file, help="e.g. zero3.yaml; default: the recipe's, or ddp.yaml")
    add("--num_processes", type=COUNT, help="on all machines; default: one per GPU, 1 without GPUs")
    add("--hosts", type=names, help="all machines, comma-separated; run the command on each")
    add("--machine_rank", type=int, default=0, help="rank of this machine, from 0")


def add_check(commands) -> None:
    add = add_recipe_verb(
        commands,
        check.check,
        "print every problem with its cause and fix, before you pay for a GPU",
    )
    add("--config_file", type=accelerate_file, help="the accelerate file of the launch, e.g. zero3.yaml")
    add("--num_processes", type=COUNT, help="processes, one per GPU; default: the accelerate file's")
    add("--gpu", help="check for this GPU instead of this machine, e.g. h100-80gb; names as in plan")
    add("--data", action="store_true", help="tokenize the rows, count supervised tokens, show three rows")
    add("--show", action="store_true", help='print the ds_config with every "auto" filled in')
    add("--traceback", action="store_true", help="show where a library raised its error")


def add_import(commands) -> None:
    add = add_verb(
        commands,
        import_config.import_,
        "convert an axolotl or LLaMA-Factory file to a recipe, and list what has no counterpart",
    )
    add("file", type=Path, help="the YAML file that the other trainer reads")
    add("--output", type=Path, help="file for the recipe; default: FILE.recipe.yaml in this folder")
    add("--allow", type=names, help="comma-separated keys to leave out, although the training differs")


def add_plans(commands) -> None:
    add = add_recipe_verb(
        commands,
        verbs.plan,
        "compute memory, time and cost of each strategy before you rent a GPU",
    )
    add(
        "--params",
        type=AMOUNT,
        help="plan a Llama-like model of this size instead of a recipe, e.g. 7e9; "
        "bf16, micro batches of 1 x 2,048 tokens",
    )
    add_machines(add)
    add("--max", action="store_true", help="find the largest micro batch and longest sequences that fit")
    add("-v", "--verbose", action="store_true", help="also print parts, phases and caveats")
    add("--json", action="store_true", help="print only JSON")

    add = add_recipe_verb(
        commands,
        verbs.rehearse,
        "run every phase of the job within minutes, with a small model on this machine",
    )
    add("--gpus", type=COUNT, required=True, help="GPUs of the real job; here at most 4 processes stand for them")
    add("--config_file", type=accelerate_file, help="e.g. zero3.yaml; default: the recipe's, or ddp.yaml")
    size = add.__self__.add_mutually_exclusive_group()
    size.add_argument("--layers", type=COUNT, help="so many layers, at the model's own width; for a GPU")
    size.add_argument("--full", action="store_true", help="the recipe's own model, with its weights")
    add("--output_dir", type=Path, help="new folder for the runs, kept; default: a temporary one")

    add = add_recipe_verb(
        commands,
        verbs.rent,
        "write job files for SkyPilot, SLURM and Kubernetes with the plan's recommendation",
        params=None,
        max=False,
    )
    add_machines(add)
    add("--image", default="zero-recipes", help="pushed image, for Kubernetes; default: %(default)s")
    add("--output_dir", type=Path, default=Path(), help="folder for the files; default: the current one")


def add_machines(add: Add) -> None:
    add("--gpus", required=True, help="number of GPUs; of a list (1,2,4,8), the smallest that fits")
    add("--gpu", default="h100-80gb", help="GPU type; docs/commands.md lists all; default: %(default)s")
    add("--strategies", type=names, help="comma-separated names, or all; default: the stages and CPU offload")
    add("--gpus_per_node", type=COUNT, default=8, help="maximum GPUs per machine; default: %(default)s")
    add("--host_memory", type=AMOUNT, help="host memory of each machine in GB; default: no limit")
    add("--nvme", type=AMOUNT, help="NVMe disk of each machine in GB, for ZeRO-Infinity")
    add("--network", type=AMOUNT, help="GB/s between machines per GPU (400 Gb/s is 50)")
    add("--quick", action="store_true", help="use formulas instead of the simulated engine")
    add("--seconds", type=AMOUNT, default=60, help="for simulations; then formulas; default: %(default)s, or inf")
    add("--price", type=AMOUNT, help="price per GPU-hour; prints the price of the run")
    add("--mean_tokens", type=AMOUNT, help="mean tokens per row, if the data is not on this machine")
    add("--hardware", type=Path, help="file with more GPUs, like zero_recipes/core/hardware.yaml")


def add_measurements(commands) -> None:
    add = add_recipe_verb(commands, verbs.sweep, "run and measure several strategies or values, one after another")
    add("--strategies", type=names, help=f"comma-separated names; default: {','.join(verbs.STAGES)}")
    add("--num_processes", type=COUNT, default=2, help="processes per run; default: %(default)s")
    add("--output_dir", type=Path, help="folder for the runs; default: output/<recipe>-sweep")
    add(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=a,b,c",
        help="one run per value of a recipe key, or of a ds_config key by its path; repeat it for all combinations",
    )

    add = add_recipe_verb(
        commands,
        verbs.tune,
        "find the fastest settings on this machine and write RECIPE.tuned.yaml",
    )
    add("--minutes", type=AMOUNT, default=10.0, help="how long to measure; default: %(default)g")
    add("--num_processes", type=COUNT, help="processes per run; default: one per GPU, 2 without GPUs")
    add("--strategies", type=names, help="default: ddp and stages 1 to 3, or offload if none fits")
    add("--output_dir", type=Path, help="folder for the runs; default: output/<recipe>-tune")


def add_results(commands) -> None:
    add = add_verb(
        commands,
        verbs.report,
        "recommend a strategy from measured runs; write tables, plots and one HTML page",
    )
    add("folder", type=Path, help="folder of a sweep or a run, e.g. output/pythia-sweep")

    add = add_model_verb(
        commands,
        verbs.ask,
        "prompt a saved model and its base model with the same prompts and score both",
    )
    add("--output_dir", type=Path, help="folder for samples.jsonl; default: output/ask-<model>")

    add = add_verb(commands, verbs.verify, "check that a saved model, adapter or checkpoint is complete")
    add("folder", type=Path, help="e.g. output/pythia, or output/pythia/checkpoint-500")
    add("--deep", action="store_true", help="also check for NaN, infinite and all-zero tensors")
    add_trust(add)

    add = add_model_verb(
        commands,
        verbs.export,
        "export a run's model, with LoRA merged, as safetensors and GGUF",
    )
    add("--gguf", nargs="+", default=[], choices=verbs.GGUF, help="file types for llama.cpp and Ollama")
    add("--llama_cpp", type=Path, help="llama.cpp's folder, whose converter writes GGUF")
    add("--output_dir", type=Path, help="default: <model>-export")


def add_model_verb(commands, func: Func, text: str) -> Add:
    add = add_verb(commands, func, text, overrides=[])
    add("model", type=Path, help="a run's output_dir, a checkpoint-N, a model or a PEFT adapter")
    add("--base", help="base model (folder, name or none); default: from the run or the adapter")
    add_trust(add)
    return add


def add_trust(add: Add) -> None:
    add("--trust_remote_code", action="store_true", help="run the model's own code")


def add_reshard(commands) -> None:
    add = add_verb(commands, verbs.reshard, "convert a checkpoint to another ZeRO stage and number of processes")
    add("checkpoint", type=Path, help="e.g. output/pythia/checkpoint-500; it is not changed")
    add("--world_size", type=COUNT, required=True, help="processes of the next run")
    add("--stage", type=int, choices=(1, 2, 3), required=True, help="its ZeRO stage")
    add("--skip_checksums", action="store_true", help="do not compare or write checksums")


def add_explain(commands) -> None:
    add = add_verb(commands, verbs.explain, "explain a code, with its cause, fix and an example")
    add("code", help="e.g. ZR104; docs/codes.md lists all")
