"""The subcommands of zero-recipes: one class each, with its help, its options and what it starts.

`run` imports what it needs: `zero-recipes --help` need not wait for torch.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from zero_recipes.core.findings import described, refusal, table
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.run_end import REFUSED
from zero_recipes.core.tables import working
from zero_recipes.engine.warnings import quieten
from zero_recipes.tools.argument_types import accelerate_file, amount, count, names, recipe_file


class Verb:
    """A subcommand: what --help says of it, its options, and what it does."""

    name: ClassVar[str]
    help: ClassVar[str]
    takes_overrides: ClassVar[bool] = False  # unknown options override keys of the recipe
    has_trust_switch: ClassVar[bool] = False  # `add_trust`: --trust_remote_code is no key of the recipe

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the subcommand's own options to its parser."""
        raise NotImplementedError

    @staticmethod
    def run(arguments: Namespace) -> int:
        """Do what the subcommand is for. Returns the exit code."""
        raise NotImplementedError


@contextmanager
def _importing() -> Iterator[None]:
    """Imports inside take seconds, say so, and are quiet."""
    with working("importing the libraries"):
        quieten()
        yield


# options that several subcommands have


def add_recipe(parser: ArgumentParser) -> None:
    """Add the recipe, which most subcommands begin with."""
    parser.add_argument(
        "recipe", type=recipe_file, help="a recipe, e.g. recipes/pythia.yaml, or pythia.yaml for the one in the package"
    )


def add_launch(parser: ArgumentParser) -> None:
    """Add the accelerate file that a recipe is launched with."""
    parser.add_argument(
        "--config_file", type=accelerate_file, help="e.g. zero3.yaml; default: the recipe's, or ddp.yaml"
    )


def add_machines(parser: ArgumentParser) -> None:
    """Add what a plan must know of the machines, and how it is made."""
    parser.add_argument("--gpus", required=True, help="number of GPUs; of a list (1,2,4,8), the cheapest that fits")
    parser.add_argument(
        "--gpu", default="h100-80gb", help="GPU type, e.g. a100-80gb; an unknown one lists all; default: %(default)s"
    )
    parser.add_argument(
        "--strategies", type=names, help="comma-separated names, or all; default: the stages and CPU offload"
    )
    parser.add_argument("--gpus_per_node", type=count, default=8, help="maximum GPUs per machine; default: %(default)s")
    parser.add_argument("--host_memory", type=amount, help="host memory of each machine in GB; default: as is usual")
    parser.add_argument("--nvme", type=amount, help="NVMe disk of each machine in GB, for ZeRO-Infinity")
    parser.add_argument("--nvme_gbps", type=amount, help="GB/s of each machine's NVMe; default: 4.5, one drive")
    parser.add_argument("--network", type=amount, help="GB/s between machines per GPU (400 Gb/s is 50)")
    parser.add_argument("--quick", action="store_true", help="use formulas instead of the simulated engine")
    parser.add_argument("--seconds", type=amount, default=60, help="for simulations, then formulas; default: 60")
    parser.add_argument("--price", type=amount, help="price per GPU-hour; prints the price of the run")
    parser.add_argument("--mean_tokens", type=amount, help="mean tokens per row, if the data is not on this machine")
    parser.add_argument("--hardware", type=Path, help="file with more GPUs, like zero_recipes/core/hardware.yaml")


def add_trust(parser: ArgumentParser) -> None:
    """Add the leave to run a model's own code."""
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code")


def add_model(parser: ArgumentParser) -> None:
    """Add a saved model, and its base."""
    add_trust(parser)
    parser.add_argument("model", type=Path, help="a run's output_dir, a checkpoint-N, a model or a PEFT adapter")
    parser.add_argument("--base", help="base model (folder, name or none); default: from the run or the adapter")


# the subcommands


class Init(Verb):
    """Files of the package, copied for editing."""

    name = "init"
    help = "copy recipes, configurations, run_sft.py and the demo's data for editing, and a recipe for your own data"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, nargs="?", default=".", help="default: the current folder")

    @staticmethod
    def run(arguments: Namespace) -> int:
        from zero_recipes.tools.train import init

        return init(arguments)


class Train(Verb):
    """A run on all GPUs of this machine, or of several."""

    name = "train"
    help = "run a recipe on all GPUs of this machine with accelerate's launcher"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        add_launch(parser)
        parser.add_argument("--num_processes", type=count, help="on all machines; default: one per GPU, 1 without GPUs")
        parser.add_argument("--hosts", type=names, help="all machines, comma-separated; run the command on each")
        parser.add_argument("--machine_rank", type=int, default=0, help="rank of this machine, from 0")

    @staticmethod
    def run(arguments: Namespace) -> int:
        from zero_recipes.tools.train import train

        return train(arguments)


class Check(Verb):
    """All findings about a run, before it costs money."""

    name = "check"
    help = "print every problem with its cause and fix, before you pay for a GPU"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        parser.add_argument(
            "--config_file", type=accelerate_file, help="the accelerate file of the launch, e.g. zero3.yaml"
        )
        parser.add_argument(
            "--num_processes", type=count, help="processes, one per GPU; default: the accelerate file's"
        )
        parser.add_argument(
            "--gpu", help="check for this GPU instead of this machine, e.g. h100-80gb; names as in plan"
        )
        parser.add_argument(
            "--data", action="store_true", help="tokenize the rows, count supervised tokens, show three rows"
        )
        parser.add_argument("--show", action="store_true", help='print the ds_config with every "auto" filled in')
        parser.add_argument("--traceback", action="store_true", help="show where a library raised its error")

    @staticmethod
    def run(arguments: Namespace) -> int:
        from zero_recipes.tools.check import check

        return check(arguments)


class Import(Verb):
    """Another trainer's file as a recipe."""

    name = "import"
    help = "convert an axolotl or LLaMA-Factory file to a recipe, and list what has no counterpart"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="the YAML file that the other trainer reads")
        parser.add_argument("--output", type=Path, help="file for the recipe; default: FILE.recipe.yaml in this folder")

    @staticmethod
    def run(arguments: Namespace) -> int:
        from zero_recipes.tools.imports.command import import_

        return import_(arguments)


class Plan(Verb):
    """What a recipe needs on which GPUs."""

    name = "plan"
    help = "compute memory, time and cost of each strategy before you rent a GPU"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        add_machines(parser)
        parser.add_argument(
            "--params",
            type=amount,
            help="plan a Llama-like model of this size, e.g. 7e9. A model's name or folder may stand in the recipe's "
            "place, too, e.g. qwen3-4b. Both: bf16, micro batches of 1 x 2,048 tokens",
        )
        parser.add_argument(
            "--max", action="store_true", help="find the largest micro batch and longest sequences that fit"
        )
        parser.add_argument("-v", "--verbose", action="store_true", help="also print parts, phases and caveats")
        parser.add_argument("--json", action="store_true", help="print only JSON")

    @staticmethod
    def run(arguments: Namespace) -> int:
        quieten()
        from zero_recipes.tools.plan import command

        return command.run(arguments, arguments.overrides)


class Atlas(Verb):
    """Plans of many models to look up."""

    name = "atlas"
    help = "open a page with the plans of many models on many GPUs; it needs no network"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("--output", type=Path, help="file for the page; default: in the cache of Hugging Face")
        parser.add_argument("--no_browser", action="store_true", help="write the page without opening it")

    @staticmethod
    def run(arguments: Namespace) -> int:
        import webbrowser

        from zero_recipes.core.files import write_text
        from zero_recipes.tools.atlas.page import whole_page
        from zero_recipes.tools.plan.cache import FOLDER

        file = arguments.output or FOLDER.parent / "atlas.html"
        write_text(file, whole_page())
        print(file.resolve())
        if not arguments.no_browser:
            webbrowser.open(file.resolve().as_uri())
        return 0


class Rehearse(Verb):
    """The whole job with a small model."""

    name = "rehearse"
    help = "run every phase of the job within minutes, with a small model on this machine"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        add_launch(parser)
        parser.add_argument(
            "--gpus", type=count, required=True, help="GPUs of the real job; here at most 4 processes stand for them"
        )
        size = parser.add_mutually_exclusive_group()
        size.add_argument("--layers", type=count, help="so many layers, at the model's own width; for a GPU")
        size.add_argument("--full", action="store_true", help="the recipe's own model, with its weights")
        parser.add_argument("--rows", type=count, help="so many rows of each split; default: all")
        parser.add_argument("--output_dir", type=Path, help="new folder for the runs, kept; default: a temporary one")

    @staticmethod
    def run(arguments: Namespace) -> int:
        with _importing():
            from zero_recipes.tools.rehearse.launches import rehearse
        return rehearse(arguments)


class Rent(Verb):
    """Job files for machines that are rented."""

    name = "rent"
    help = "write job files for SkyPilot, SLURM and Kubernetes with the plan's recommendation"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        add_machines(parser)
        parser.set_defaults(params=None, max=False)  # of `plan`, which reads the same arguments
        parser.add_argument(
            "--image", default="zero-recipes", help="pushed image, for Kubernetes; default: %(default)s"
        )
        parser.add_argument(
            "--output_dir", type=Path, default=".", help="folder for the files; default: the current one"
        )

    @staticmethod
    def run(arguments: Namespace) -> int:
        with _importing():
            from zero_recipes.tools.rent import rent
        return rent(arguments)


class Sweep(Verb):
    """Several strategies or values, run one after another."""

    name = "sweep"
    help = "run and measure several strategies or values, one after another"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        parser.add_argument(
            "--strategies", type=names, help="comma-separated names; default: ddp,zero0,zero1,zero2,zero3"
        )
        parser.add_argument("--num_processes", type=count, default=2, help="processes per run; default: %(default)s")
        parser.add_argument("--output_dir", type=Path, help="folder for the runs; default: output/<recipe>-sweep")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            dest="sets",
            metavar="KEY=a,b,c",
            help="one run per value of a recipe key; repeat it for all combinations",
        )

    @staticmethod
    def run(arguments: Namespace) -> int:
        with working("importing the libraries"):
            from zero_recipes.metrics.schema import ORDER
            from zero_recipes.tools.sweep import sweep

        output_dir = arguments.output_dir or Path("output") / f"{arguments.recipe.stem}-sweep"
        strategies = arguments.strategies or list(ORDER)
        runs = (arguments.recipe, strategies, arguments.num_processes, output_dir, arguments.overrides)
        statuses = sweep(*runs, sets=arguments.sets).values()
        print(f"zero-recipes report {output_dir}")
        fine = {"ok"}
        if arguments.sets and "ok" in statuses:
            fine.add("refused")  # what cannot run here is an answer too
        return 0 if fine.issuperset(statuses) else 1


class Tune(Verb):
    """The fastest settings on this machine."""

    name = "tune"
    help = "find the fastest settings on this machine and write RECIPE.tuned.yaml"
    takes_overrides = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_recipe(parser)
        parser.add_argument("--minutes", type=amount, default=10.0, help="how long to measure; default: %(default)g")
        parser.add_argument(
            "--num_processes", type=count, help="processes per run; default: one per GPU, 2 without GPUs"
        )
        parser.add_argument("--strategies", type=names, help="default: ddp and stages 1 to 3, or offload if none fits")
        parser.add_argument("--output_dir", type=Path, help="folder for the runs; default: output/<recipe>-tune")

    @staticmethod
    def run(arguments: Namespace) -> int:
        with _importing():
            from zero_recipes.tools.tune import tune
        return tune(arguments)


class Report(Verb):
    """A recommendation from measured runs."""

    name = "report"
    help = "recommend a strategy from measured runs; write tables, plots and one HTML page"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help="folder of a sweep or a run, e.g. output/pythia-sweep")

    @staticmethod
    def run(arguments: Namespace) -> int:
        from zero_recipes.tools.report.page import write_report

        print(f"report: {write_report(arguments.folder)}")
        return 0


class Ask(Verb):
    """A saved model beside its base, on the same prompts."""

    name = "ask"
    help = "prompt a saved model and its base model with the same prompts and score both"
    takes_overrides = True
    has_trust_switch = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_model(parser)
        parser.add_argument("--output_dir", type=Path, help="folder for samples.jsonl; default: output/ask-<model>")

    @staticmethod
    def run(arguments: Namespace) -> int:
        with _importing():
            from zero_recipes.tools.ask import ask
        return ask(arguments)


class Verify(Verb):
    """Whether a saved model is whole."""

    name = "verify"
    help = "check that a saved model, adapter or checkpoint is complete"
    has_trust_switch = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_trust(parser)
        parser.add_argument("folder", type=Path, help="e.g. output/pythia, or output/pythia/checkpoint-500")
        parser.add_argument("--deep", action="store_true", help="also check for NaN, infinite and all-zero tensors")

    @staticmethod
    def run(arguments: Namespace) -> int:
        from zero_recipes.tools.verify import verify

        if not arguments.folder.is_dir():
            raise refusal("ZR796", folder=arguments.folder, cwd=Path.cwd())
        found = verify(arguments.folder, arguments.deep, arguments.trust_remote_code)
        counts = f"{found['tensors']} tensors, {found['parameters']:,} parameters, {found['bytes']:,} bytes"
        print(f"{arguments.folder}: complete, {counts}")
        return 0


class Export(Verb):
    """A run's model for other programs."""

    name = "export"
    help = "export a run's model, with LoRA merged, as safetensors and GGUF"
    takes_overrides = True
    has_trust_switch = True

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        add_model(parser)
        parser.add_argument(
            "--gguf",
            nargs="+",
            default=[],
            choices=["f16", "bf16", "q8_0"],
            help="file types for llama.cpp and Ollama",
        )
        parser.add_argument("--llama_cpp", type=Path, help="llama.cpp's folder, whose converter writes GGUF")
        parser.add_argument(
            "--merge_into",
            choices=["dequantized", "base"],
            help="of QLoRA: the dequantized weights that it was trained on (the default), or the base model",
        )
        parser.add_argument("--output_dir", type=Path, help="default: <model>-export")

    @staticmethod
    def run(arguments: Namespace) -> int:
        with _importing():
            from zero_recipes.tools.export import export
        return export(arguments)


class Push(Verb):
    """A run's model, uploaded to the Hub."""

    name = "push"
    help = "upload a run's model, model card and measurements to the Hub, without local paths"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help="a run's output_dir, e.g. output/pythia")
        parser.add_argument("--hub_model_id", required=True, help="the repository, e.g. me/pythia-alpaca")
        parser.add_argument("--private", action="store_true", help="create it as a private repository")

    @staticmethod
    def run(arguments: Namespace) -> int:
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


class Reshard(Verb):
    """A checkpoint for another stage and number of processes."""

    name = "reshard"
    help = "convert a checkpoint to another ZeRO stage and number of processes"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("checkpoint", type=Path, help="e.g. output/pythia/checkpoint-500; it is not changed")
        parser.add_argument("--world_size", type=count, required=True, help="processes of the next run")
        parser.add_argument("--stage", type=int, choices=[1, 2, 3], required=True, help="its ZeRO stage")
        parser.add_argument("--skip_checksums", action="store_true", help="do not compare or write checksums")

    @staticmethod
    def run(arguments: Namespace) -> int:
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


class Explain(Verb):
    """What a finding's code means."""

    name = "explain"
    help = "explain a code, with its cause, fix and an example"

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("code", help="e.g. ZR104, as a message has it; all: a list of all codes")

    @staticmethod
    def run(arguments: Namespace) -> int:
        code = arguments.code.upper()
        if code == "ALL":
            for known in sorted(table()):
                print(f"{known}  {' '.join(described(known)['what'].split())}")
            return 0
        if code not in table():
            print(f"unknown code {code}; `zero-recipes explain all` lists all codes", file=sys.stderr)
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


# in the order in which --help lists them
VERBS: tuple[type[Verb], ...] = (
    Init,
    Train,
    Check,
    Import,
    Plan,
    Atlas,
    Rehearse,
    Rent,
    Sweep,
    Tune,
    Report,
    Ask,
    Verify,
    Export,
    Push,
    Reshard,
    Explain,
)
