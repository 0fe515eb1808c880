"""`zero-recipes sweep`: launch one strategy or value after another. A failure is a row, not a crash."""

import collections
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from zero_recipes.checkpoint import output_dir as folders
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import FOLDER, launched_environment
from zero_recipes.config.command_line import words_without_tokens
from zero_recipes.config.keys import key_findings, key_types
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.files import at_hand
from zero_recipes.core.findings import Refusal, ignored_codes, refusal
from zero_recipes.core.folder_lock import held, refuse_in_use
from zero_recipes.core.host import Host
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import kill_with_children
from zero_recipes.core.run_end import REFUSAL_FILE
from zero_recipes.core.tables import plain, terminal, working
from zero_recipes.engine.warnings import quieten
from zero_recipes.metrics.failure import REFUSAL, failed_row, not_begun
from zero_recipes.metrics.read_runs import SweptRun, add_to_sweep_file
from zero_recipes.metrics.schema import FILE, Metrics
from zero_recipes.tools.report.read import value_text

SCRIPT = "run_sft.py"
LONGEST_NAME = 120  # characters of a run's folder; a file system takes 255 bytes
LOGGED = re.compile(r"step \d+ of \d+: loss [\w.+-]+")  # what a run prints (training/progress.py)
UNSAFE = re.compile(r"[^A-Za-z0-9._+,=-]")
# what each run of a sweep has of its own, or all of them alike
NOT_SWEPT = ("output_dir", "overwrite", "resume_from_checkpoint")


def sweep(
    recipe: Path,
    strategies: list[str],
    num_processes: int,
    output_dir: Path,
    overrides: list[str],
    sets: Sequence[str] = (),
) -> dict[str, str]:
    """Run each strategy with each combination of the values in `sets` (KEY=a,b,c).

    Returns {name of a run's folder: its status}.
    Raises Refusal before the first run.
    """
    quieten()
    console = terminal()
    configs = {}
    # what it refuses here, it would refuse in every run
    with working(f"reading {recipe}"):
        settings = parse_recipe(recipe, recipes.recipe_in_force(recipe), overrides).settings
        refuse_own_ds_config(recipe, settings)
        for name in strategies:
            configs[name] = at_hand(FOLDER / f"{name}.yaml")
            launched_environment(configs[name], num_processes)
    from zero_recipes.checks import schedule  # imports torch, as reading the recipe has done

    # a sweep of a few steps measures: where their learning rate is, is a warning
    ignored = sorted(ignored_codes(settings.ignore).union(schedule.CODES))
    overrides = [f"--ignore={','.join(ignored)}", *overrides]
    runs = runs_of(configs, sets)
    with held(output_dir, "sweep"):
        refuse_results(recipe, settings, output_dir, runs)
        if sets:
            own = [SweptRun(folder=run.name, strategy=run.strategy, values=dict(run.values)) for run in runs]
            with library_error_as_finding("writing sweep.json beside the runs of earlier sweeps"):
                add_to_sweep_file(output_dir, own)
            console.print(plain(f"{len(runs)} runs: {', '.join(run.name for run in runs)}"), soft_wrap=True)
        return run_all(recipe, runs, output_dir, num_processes, overrides, console)


def run_all(
    recipe: Path,
    runs: Sequence["SweepRun"],
    output_dir: Path,
    num_processes: int,
    overrides: list[str],
    console: Console,
) -> dict[str, str]:
    """Launch one run after another. Returns the status of each, by the name of its folder."""
    ended = {}
    for number, run in enumerate(runs, 1):
        folder = output_dir / run.name
        label = f"[{number}/{len(runs)}] {run.name}"
        start = time.perf_counter()
        row = launched(recipe, run, folder, label, num_processes, overrides, console)
        ended[run.name] = row.status
        ending = f"{label}: {row.status} after {time.perf_counter() - start:.0f} s"
        if row.status != "ok":
            ending += f", see {folder / 'log.txt'}"
        if row.status == "refused":
            ending += f": {row.failure.reason} [{row.failure.code}]"
        console.print(plain(ending), soft_wrap=True)
    return ended


def launched(
    recipe: Path,
    run: "SweepRun",
    folder: Path,
    label: str,
    ranks: int,
    overrides: list[str],
    console: Console,
) -> Metrics:
    """Launch one run. Returns its measurements, or its failure.

    No weights are saved unless `overrides` or the run say so.
    """
    folders.claim_output_dir(folder, overwrite=True)  # its numbers must not become this run's row
    (folder / FILE).unlink(missing_ok=True)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", run.config]
    words += ["--num_processes", ranks, "--main_process_port", 0]  # a free port
    words += [at_hand(SCRIPT), recipe, "--output_dir", folder]
    named = {word.partition("=")[0] for word in (*overrides, *run.words)}
    if named.isdisjoint(("--save_model", "--save_strategy")):
        words += ["--save_model", "false", "--save_strategy", "no", "--save_on_signal", "false"]
    command = [str(word) for word in (*words, *overrides, *run.words)]
    exit_code, log = run_logged(command, folder, label, console, Host().threads(ranks))
    return row_of(folder, run.strategy, exit_code, log)


def row_of(folder: Path, strategy: str, exit_code: int, log: str) -> Metrics:
    """Unreadable files are a failed run."""
    try:
        if exit_code:
            failed_row(folder, strategy, exit_code, log).write(folder / FILE)
        return Metrics.read(folder / FILE)
    except (ValueError, OSError) as error:  # ContractError is a ValueError
        error = f"exit code {exit_code}; {error}"
        row = not_begun(strategy, strategy).model_copy(update={"status": "failed", "error": error})
        row.write(folder / FILE)
        return row


def refuse_own_ds_config(recipe: Path, settings: Settings) -> None:
    """Refuse a recipe's own ds_config.

    It would clash with a strategy's, or train by it in a row that is called ddp.
    """
    if settings.deepspeed is not None:
        raise refusal("ZR861", recipe=recipe)


def refuse_results(recipe: Path, settings: Settings, output_dir: Path, runs: Sequence["SweepRun"]) -> None:
    """Refuse to write over results of earlier runs without `overwrite`, or over a run's inputs. Raises Refusal."""
    occupied = []
    for run in runs:
        folder = output_dir / run.name
        refuse_in_use(folder)
        if folders.saved_in(folder):
            occupied.append(folder)
    if occupied and not settings.overwrite:
        raise refusal("ZR329", occupied=", ".join(map(str, occupied)))
    inputs = list(folders.inputs_of(settings, recipe, os.environ))
    for folder in occupied:
        folders.refuse_occupied(folder, None, overwrite=True, inputs=inputs)


def environment_of(folder: Path, threads: int) -> dict[str, str]:
    """Make the environment of a launch into `folder`."""
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"PYTHONUNBUFFERED": "1"}
    environment[REFUSAL_FILE] = str((folder / REFUSAL).resolve())
    return environment


def started(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a process in a session of its own: Ctrl-C at the terminal does not reach it."""
    return subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def run_logged(
    command: list[str], folder: Path, label: str, console: Console, threads: int, start: Callable[..., Any] = started
) -> tuple[int, str]:
    """Run a launch, and show how far it is. Returns its exit code and the log's last 400 lines.

    The whole log goes to folder/log.txt.
    `start`: as `started`, with what it returns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = environment_of(folder, threads)
    with open(folder / "log.txt", "w") as log, working(f"{label}: starting", console) as say:
        log.write(" ".join(words_without_tokens(command)) + "\n")
        child = start(command, environment)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        tail: collections.deque[str] = collections.deque(maxlen=400)
        try:
            for line in child.stdout:
                log.write(line)
                tail.append(line.rstrip("\n"))
                logged = LOGGED.match(line)
                if logged:
                    message = f"{label}: {logged[0]}"
                    say(message)
                    if not console.is_terminal:  # where no status moves
                        console.print(plain(message), soft_wrap=True)
            return child.wait(), "\n".join(tail)
        finally:
            signal.signal(signal.SIGTERM, before)
            if child.poll() is None:  # interrupted
                kill_with_children(psutil.Process(child.pid))


# the runs of a sweep: strategies by the values of `--set KEY=a,b,c`


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep: a strategy, and values of the recipe's keys."""

    strategy: str
    config: Path  # the strategy's accelerate file
    values: Mapping[str, Any]  # of the recipe's keys: what the sweep sets

    @property
    def name(self) -> str:
        """The name of the run's folder: safe on any file system and unique."""
        text = self.strategy
        for key, value in self.values.items():
            text += f",{key}={value_text(value)}"
        name = UNSAFE.sub("_", text)[:LONGEST_NAME]
        if name == text:
            return name
        return f"{name},{hashlib.sha256(text.encode()).hexdigest()[:8]}"  # other values may give the same name

    @property
    def words(self) -> list[str]:
        """The values on run_sft.py's command line."""
        words = []
        for key, value in self.values.items():
            if isinstance(value, list):
                words += [f"--{key}", *map(value_text, value)]
            else:
                words.append(f"--{key}={value_text(value)}")
        return words


def runs_of(configs: Mapping[str, Path], sets: Sequence[str]) -> list[SweepRun]:
    """List the runs of a sweep, one a strategy and combination of values. `configs`: {strategy: accelerate file}.

    Raises Refusal for an unknown key. Each run checks its own values.
    """
    listed = parse_sets(sets, key_types())
    runs = []
    for name, *values in product(configs, *listed.values()):
        runs.append(SweepRun(name, configs[name], dict(zip(listed, values, strict=True))))
    return runs


def parse_sets(texts: Sequence[str], types: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Read the `--set` options, each a YAML list without brackets: {key: its values}.

    `types`: every key of a recipe.
    Raises Refusal for unknown or repeated keys and unreadable values.
    """
    sets: dict[str, list[Any]] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        key = key.strip()
        if key in NOT_SWEPT:
            raise refusal("ZR358", key=key)
        if key not in types:
            raise Refusal(list(key_findings("--set", [key], types)))
        why = "It needs a key of its own and distinct, comma-separated values."
        values = []
        written = set()
        try:
            values = yaml.safe_load(f"[{listed}]")
            written = {value_text(value) for value in values}
        except (yaml.YAMLError, TypeError) as error:
            why = f"{' '.join(str(error).split())}."
        if key in sets or not written or len(written) < len(values):
            raise refusal("ZR355", text=text[:80], why=why)
        sets[key] = values
    return sets
