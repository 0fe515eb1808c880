"""`zero-recipes rehearse`: launch a recipe as it is, with a small model, and judge every phase of the job."""

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from torch.distributed.elastic.utils.distributed import get_free_port

from zero_recipes.checkpoint.save import MANIFEST
from zero_recipes.checks import schedule
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import FOLDER, LAUNCH_KEYS, environments_of_ranks, file_named, launch_of
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.resolved_recipe import without_tokens
from zero_recipes.config.settings import Settings, derive_accumulation
from zero_recipes.core.files import at_hand, write_json
from zero_recipes.core.findings import ignored_codes, shown
from zero_recipes.core.folder_lock import held
from zero_recipes.core.host import Host
from zero_recipes.core.process import kill_with_children
from zero_recipes.core.run_end import FAILED, REFUSED
from zero_recipes.core.tables import Column, plain, print_columns, terminal, working
from zero_recipes.core.units import duration
from zero_recipes.data.samples import takes_rows
from zero_recipes.engine.warnings import quieten
from zero_recipes.metrics.schema import FILE, Metrics
from zero_recipes.tools import sweep
from zero_recipes.tools.rehearse import equality, one_gpu
from zero_recipes.tools.rehearse.forked import ForkServer
from zero_recipes.tools.rehearse.phases import ALONE, EQUAL, FIRST, RESUMED, Ran, Rehearsal, table_of
from zero_recipes.tools.rehearse.small import make_small
from zero_recipes.tools.rehearse.words import EVERY_LAUNCH, KEEPS_MEMORY, NEED_GPU, ONE_MACHINE

MOST_RANKS = 4
MOST_PASSES = 2  # micro batches of a step
MOST_SAMPLES = 8
NEW_TOKENS = 8
MOST_LENGTH = 2048  # tokens of a row on CPUs, once the longest have been trained on
POLL_SECONDS = 0.01
COLUMNS = [
    Column("Phase", lambda row: row.phase),
    Column("Time", lambda row: "" if row.seconds is None else duration(row.seconds)),
    Column("Result", lambda row: row.result),
    Column("", lambda row: row.detail),
]


def rehearse(arguments: argparse.Namespace) -> int:
    """Launch a job's phases with a small model, and print what became of each. Returns the exit code.

    Raises Refusal before the first launch.
    """
    quieten()
    console = terminal()
    began = time.perf_counter()
    folder = arguments.output_dir or Path(tempfile.mkdtemp(prefix="rehearsal-"))
    with held(folder, "rehearse"):
        rehearsal = read_rehearsal(arguments, folder, console)
        ran = launch_all(rehearsal, folder, console)
    rows = table_of(rehearsal, ran)
    print_columns(COLUMNS, [], rows, console)
    if rehearsal.nccl and "whole" in ran:
        one_gpu.print_memory(ran["whole"].metrics, console)
    console.print(f"rehearsed in {duration(time.perf_counter() - began)}")
    findings = [row.finding for row in rows if row.finding is not None]
    if findings:
        console.print(plain(shown(findings)), soft_wrap=True)
        statuses = [one.metrics.status for name, one in ran.items() if name not in ALONE]
        return REFUSED if "refused" in statuses else FAILED
    if arguments.output_dir is None:
        shutil.rmtree(folder)
    return 0


def read_rehearsal(arguments: argparse.Namespace, folder: Path, console: Console) -> Rehearsal:
    """Write the small model, and say what is smaller than the job. Raises Refusal."""
    path = arguments.recipe
    mapping = recipes.recipe_in_force(path)
    if launch_of(mapping):  # of the real job: a run refuses another launch than its recipe's
        path = folder / "recipe.yaml"
        own = {key: value for key, value in mapping.items() if key not in LAUNCH_KEYS}
        write_json(path, without_tokens(own))  # JSON is YAML
    real = parse_recipe(path, mapping, arguments.overrides)
    settings = real.settings
    shares = settings.sequence_parallel_size
    cards = 0 if settings.use_cpu else torch.cuda.device_count()
    ranks = ranks_of(arguments.gpus, cards, Host().cores(), shares)
    replicas = arguments.gpus // shares
    passes = derive_accumulation(settings, real.explicit, replicas)
    if passes is not None:
        settings = settings.replace(gradient_accumulation_steps=passes)
    values = shortened(settings, ranks // shares)
    if arguments.rows is not None:
        values |= first_rows(settings, arguments.rows)
    words = [*arguments.overrides, *EVERY_LAUNCH.split()]
    words += [f"--{key}={value}" for key, value in values.items()]
    place = f"{ranks} of {arguments.gpus} ranks"
    shortens = False
    if not cards:
        on_cpu, needed = cpu_words(settings)
        words += on_cpu
        shortens = shares == 1 and (settings.max_length or 0) > MOST_LENGTH
        if shortens:
            needed.append(f"rows above {MOST_LENGTH} tokens but in the first launch")
        place += f" on CPUs: without {', '.join(['NCCL', *needed])}"
    model = f"the whole of {settings.model_name_or_path}"
    if not arguments.full:
        small = folder / "model"
        with working(f"making a small {settings.model_name_or_path}", console):
            model = make_small(parse_recipe(path, mapping, words).settings, small, arguments.layers)
        words += ["--model_name_or_path", str(small), "--model_revision", "main", "--random_weights", "false"]
    words.append(f"--ignore={','.join(ignored_in(settings, arguments.full))}")
    equal = None
    launched_settings = parse_recipe(path, mapping, words).settings
    is_small = not arguments.full and arguments.layers is None
    why_not_equal = equality.why_not_launched(launched_settings, is_small)
    if why_not_equal is None:
        equal = equality.equal_launch(launched_settings, folder / "model")
    console.print(plain(f"{model}\n{place}"), soft_wrap=True)
    config_file = arguments.config_file or file_named(mapping) or at_hand(FOLDER / "ddp.yaml")
    nccl = one_gpu.nccl_library() if cards == 1 < ranks else None
    return Rehearsal(path, settings, replicas, words, config_file, ranks, nccl, shortens, equal, why_not_equal)


def ranks_of(gpus: int, cards: int, cores: int, shares: int) -> int:
    """Processes of the rehearsal. `cards`: GPUs here; `shares`: processes that share a sequence."""
    here = {0: max(2, cores), 1: MOST_RANKS}.get(cards, cards)
    ranks = min(gpus, MOST_RANKS, here)
    return max(shares, ranks - ranks % shares)


def shortened(settings: Settings, replicas: int) -> dict[str, Any]:
    """Overrides that depend on the recipe. `replicas`: ranks with rows of their own."""
    passes = min(settings.gradient_accumulation_steps, MOST_PASSES)
    values: dict[str, Any] = {"gradient_accumulation_steps": passes}
    values["sample_max_new_tokens"] = min(settings.sample_max_new_tokens, NEW_TOKENS)
    if settings.global_batch_size is not None:
        values["global_batch_size"] = settings.per_device_train_batch_size * passes * replicas
    if settings.warmup_steps >= 1:
        values["warmup_steps"] = 1
    if takes_rows(settings.sample_prompts):
        values["sample_prompts"] = min(int(settings.sample_prompts), MOST_SAMPLES)
    return values


def ignored_in(settings: Settings, is_whole: bool) -> list[str]:
    """Codes that the launches ignore: the recipe's, and what is so of a rehearsal alone."""
    codes = ignored_codes(settings.ignore)
    codes |= set(schedule.CODES)  # the phase `schedule` judges that of the job; three steps have another
    if not is_whole and names_layers(settings):
        codes |= {"ZR446"}
    return sorted(codes)


def names_layers(settings: Settings) -> bool:
    """Whether an adapter is put on layers by their numbers: the small model lacks some of them."""
    keys = (settings.lora_target_modules, settings.lora_target_parameters, settings.lora_modules_to_save)
    named = json.dumps([*keys, settings.peft_config], default=str)
    return settings.use_peft and re.search(r"layers_to_transform|\.\d+\.", named) is not None


def first_rows(settings: Settings, count: int) -> dict[str, Any]:
    """Overrides for the first rows of each split. A stream needs none."""

    def part(split: str | None) -> str:
        split = split or "train"
        is_whole = split != "all" and {*"[+"}.isdisjoint(split)
        return f"{split}[:{count}]" if is_whole else split

    if settings.streams:
        return {}
    if settings.datasets:
        entries = [entry | {"split": part(entry.get("split"))} for entry in settings.datasets]
        return {"datasets": json.dumps(entries)}
    return {key: part(getattr(settings, key)) for key in ("dataset_train_split", "dataset_test_split")}


def cpu_words(settings: Settings) -> tuple[list[str], list[str]]:
    """Replace what needs a GPU. Returns overrides, and what was replaced."""
    words = ["--skip_plan", "true", "--supervised_logits_only", "true"]  # as TRL does on GPUs
    needed = []
    for key, (values, instead) in NEED_GPU.items():
        value = str(getattr(settings, key))
        if re.search(values, value):
            words += [f"--{key}", *instead.split()]
            needed.append(f"{key}: {value}")
    if settings.sequence_parallel_size > 1:  # gloo takes batches of one size (ZR251)
        length = min(settings.max_length or MOST_LENGTH, MOST_LENGTH)
        words += f"--max_length {length} --pad_to_multiple_of {length}".split()
        if length != settings.max_length:
            needed.append(f"max_length: {settings.max_length}")
    return words, needed


def launch_all(rehearsal: Rehearsal, folder: Path, console: Console) -> dict[str, Ran]:
    """Launch in order, up to one that fails and that others go on from.

    The first is a launch as it is, the others are forked.
    """
    ran: dict[str, Ran] = {}
    with fork_server(rehearsal, folder) as server:
        for name in rehearsal.launches:
            label = f"[{len(ran) + 1}/{len(rehearsal.launches)}] {name}"
            ran[name] = launched(rehearsal, folder / name, label, console, server if ran else None)
            if not (ran[name].is_over or name in ALONE):
                break
    return ran


@contextlib.contextmanager
def fork_server(rehearsal: Rehearsal, folder: Path) -> Iterator[ForkServer | None]:
    """Start the server that ranks are forked from, and end it.

    Its imports go on beside the first launch's, which waits for its launcher's. None for several ranks on one GPU:
    one_gpu.sh starts each with a library of its own.
    """
    if rehearsal.nccl:
        yield None
        return
    out = folder / next(iter(rehearsal.launches))
    with ForkServer(script_of(rehearsal, out), environments_of(rehearsal, out)[0]) as server:
        yield server


def launched(rehearsal: Rehearsal, out: Path, label: str, console: Console, server: ForkServer | None = None) -> Ran:
    """Launch the rehearsal into `out`, a folder of the launch's name. `server`: where its ranks are forked."""
    began = time.perf_counter()
    if out.name in RESUMED:
        shutil.copytree(out.with_name("killed"), out)
    start = sweep.started
    if server is not None:
        start = partial(server.start, script_of(rehearsal, out), environments_of(rehearsal, out))
    over = threading.Event()
    if out.name == "killed":
        threading.Thread(target=_kill_when_saved, args=(out, over, server), daemon=True).start()
    command = command_of(rehearsal, out)
    exit_code, log = sweep.run_logged(command, out, label, console, threads_of(rehearsal), start)
    if over.is_set():
        metrics = Metrics.read(out / FILE)
    else:
        over.set()
        metrics = sweep.row_of(out, rehearsal.config_file.stem, exit_code, log)
    seconds = time.perf_counter() - began
    console.print(plain(f"{label}: {metrics.status} after {duration(seconds)}"), soft_wrap=True)
    return Ran(out, metrics, seconds)


def command_of(rehearsal: Rehearsal, out: Path) -> list[str]:
    """Write the command of the launch that `out` is named after."""
    ranks = rehearsal.ranks_in(out.name)
    words: list[Any] = [sys.executable, "-m", "accelerate.commands.launch"]
    if rehearsal.nccl and ranks > 1:
        words = ["bash", one_gpu.SCRIPT, rehearsal.nccl, ranks, get_free_port(), *words]
    else:
        variables = [f"{name}={value}" for name, value in KEEPS_MEMORY.items()]
        words = ["env", *variables, *words, *ONE_MACHINE.split()]
    words += ["--config_file", rehearsal.config_file, "--num_processes", ranks, *script_of(rehearsal, out)]
    return [str(word) for word in words]


def script_of(rehearsal: Rehearsal, out: Path) -> list[str]:
    """The script with its arguments, as each rank has them."""
    script = equality.SCRIPT if out.name == EQUAL else at_hand("run_sft.py")
    words = [script, rehearsal.recipe, "--output_dir", out, *rehearsal.words]
    return [str(word) for word in (*words, *rehearsal.launches[out.name])]


def threads_of(rehearsal: Rehearsal) -> int:
    """Count the threads of each rank, on half the ranks, too.

    A forked rank's were set when its server imported torch.
    """
    return Host().threads(rehearsal.ranks)


def environments_of(rehearsal: Rehearsal, out: Path) -> list[dict[str, str]]:
    """What `command_of` gives to each rank."""
    environment = sweep.environment_of(out, threads_of(rehearsal)) | KEEPS_MEMORY
    ranks = rehearsal.ranks_in(out.name)
    return environments_of_ranks(rehearsal.config_file, ranks, get_free_port(), environment)


def _kill_when_saved(out: Path, over: threading.Event, server: ForkServer | None) -> None:
    """SIGKILL for a launch once its first checkpoint is whole: in the next step, or just before it. Sets `over`."""
    while not over.wait(POLL_SECONDS):
        if (out / FIRST / MANIFEST).exists():
            over.set()
            for process in psutil.Process().children():
                if str(out) in process.cmdline():
                    kill_with_children(process)
            if server is not None:
                server.kill_ranks()
