"""`zero-recipes sweep`: one strategy or value after another through the real launcher, each into a folder of its own; a
failure is a row, not a crash."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console

from zero_recipes.checkpoint.output_dir import claim_output_dir, refuse_in_use, refuse_occupied, saved_in
from zero_recipes.cli.sweep_runs import SweepRun, refuse_own_ds_config, runs_of
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import FOLDER
from zero_recipes.config.ds_config import NVME_PATH
from zero_recipes.core.findings import refusal
from zero_recipes.core.host import Host
from zero_recipes.core.process import free_port
from zero_recipes.core.tables import plain, terminal
from zero_recipes.libs.warnings import quieten
from zero_recipes.metrics.failure import failed_row
from zero_recipes.metrics.read_runs import SWEEP_FILE, SweptRun, read_sweep_file
from zero_recipes.metrics.schema import FILE, ORDER, SCHEMA, ContractError, Metrics


class Outcome(NamedTuple):
    """How one run ended."""

    name: str
    status: str
    seconds: float
    folder: Path


def sweep(
    recipe: Path,
    strategies: list[str],
    num_processes: int,
    output_dir: Path,
    overrides: list[str],
    script: Path = Path("run_sft.py"),
    sets: Sequence[str] = (),
) -> list[Outcome]:
    """Run `recipe` under each strategy, and each combination of the values in `sets` (KEY=a,b,c).

    Saves no weights unless the overrides name that. Raises Refusal before the first run where a file is missing, a
    key is unknown, the recipe names a ds_config itself, or a folder holds an earlier run's results.
    """
    quieten()
    configs = {name: FOLDER / f"{name}.yaml" for name in strategies}
    for path in (recipe, script, *configs.values()):
        if not path.is_file():
            raise refusal("ZR328", path=path, cwd=Path.cwd(), known=", ".join(all_strategies()) or "none")
    console = terminal()
    # what it refuses here, it would refuse in every run
    settings = recipes.parse_recipe(recipe, recipes.read_recipe_file(recipe), overrides).settings
    runs = runs_of(recipe, configs, sets, overrides, num_processes)
    refuse_own_ds_config(recipe, settings, runs, num_processes)
    _refuse_occupied([output_dir / run.name for run in runs], settings.overwrite)
    if sets:
        _announce(runs, output_dir, console)
    shared, swap = list(overrides), output_dir / "swap"
    swaps = any(name.endswith("_infinity") for name in configs)
    if swaps and settings.nvme_path is None and NVME_PATH not in os.environ:
        console.print(plain(f"no {NVME_PATH}: ZeRO-Infinity swaps to {swap}"), soft_wrap=True)
        swap.mkdir(parents=True, exist_ok=True)
        shared += ["--nvme_path", str(swap)]
    outcomes = []
    for number, run in enumerate(runs, 1):
        folder = output_dir / run.name
        label = f"[{number}/{len(runs)}] {run.name}"
        previous = claim_output_dir(folder, overwrite=True)  # its numbers must not become this run's row
        (folder / FILE).unlink(missing_ok=True)
        start = time.perf_counter()
        if run.refusal is not None:
            error = " ".join(line.strip() for line in str(run.refusal.findings[0]).splitlines())
            row = _unmeasured(folder, recipe.stem, run.strategy, "refused", error)
        else:
            words = [*shared, *run.words]
            command = launch_of_strategy(recipe, run.config_in(folder), num_processes, folder, words, script)
            exit_code, log = _run(command, folder, label, console, Host().threads(num_processes))
            row = _row(folder, run.strategy, exit_code, log)
        outcomes.append(Outcome(run.name, row.status, time.perf_counter() - start, folder))
        ending = f"{label}: {row.status} after {outcomes[-1].seconds:.0f} s"
        ending += f", see {folder / 'log.txt'}" if row.status != "ok" and run.refusal is None else ""
        if row.status == "refused":
            ending += f": {row.error.removeprefix('refused: ').partition(' why: ')[0]}"
        ending += f"; the results that were there are in {previous}" if previous else ""
        console.print(plain(ending), soft_wrap=True)
    return outcomes


def _announce(runs: list[SweepRun], output_dir: Path, console: Console) -> None:
    """Write sweep.json, and say how many runs there will be."""
    own = [SweptRun(folder=run.name, strategy=run.strategy, values=dict(run.values)) for run in runs]
    try:
        read_sweep_file(output_dir).with_runs(own).write(output_dir)
    except ContractError as error:
        raise refusal("ZR361", output_dir=output_dir / SWEEP_FILE, error=error) from error
    strategies = len({run.strategy for run in runs})
    keys = {key: len({json.dumps(run.values[key]) for run in runs}) for key in runs[0].values}
    counts = [f"{strategies} strateg{'y' if strategies == 1 else 'ies'}"]
    counts += [f"{count} value{'' if count == 1 else 's'} of {key}" for key, count in keys.items()]
    console.print(plain(f"{len(runs)} runs: {' x '.join(counts)}"), soft_wrap=True)


def _row(folder: Path, strategy: str, exit_code: int, log: str) -> Metrics:
    """What a run has measured, or how it failed. Files that cannot be read are a failure that says so."""
    try:
        if exit_code:
            failed_row(folder, strategy, exit_code, log).write(folder / FILE)
        return Metrics.read(folder / FILE)
    except (ValueError, OSError) as error:  # ContractError is a ValueError
        return _unmeasured(folder, strategy, strategy, "failed", f"exit code {exit_code}; {error}")


def _unmeasured(folder: Path, name: str, strategy: str, status: str, error: str) -> Metrics:
    row = Metrics(schema=SCHEMA, name=name, strategy=strategy, status=status, error=error)
    row.write(folder / FILE)
    return row


def all_strategies(config_folder: Path = FOLDER) -> list[str]:
    """Every strategy that has an accelerate file, the plain stages first. What cannot run here becomes a row that says
    why, and costs seconds: the run itself refuses."""
    files = {path.stem: yaml.safe_load(path.read_text()) or {} for path in config_folder.glob("*.yaml")}
    names = {name for name, launched in files.items() if launched.get("num_machines", 1) == 1}
    return [*(name for name in ORDER if name in names), *sorted(names - {*ORDER})]


def launch_of_strategy(
    recipe: Path, config: Path, num_processes: int, folder: Path, overrides: list[str], script: Path
) -> list[str]:
    """The command line that a user would type for this strategy. Without a word on it no weights are saved."""
    named = {word.partition("=")[0] for word in overrides} & {"--save_model", "--save_strategy"}
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(config), "--num_processes", str(num_processes)),
        *("--main_process_port", str(free_port())),
        *(str(script), str(recipe), "--output_dir", str(folder)),
        *(() if named else ("--save_model", "false", "--save_strategy", "no")),
        *overrides,
    ]


def _refuse_occupied(folders: list[Path], overwrite: bool) -> None:
    for folder in folders:
        refuse_in_use(folder)
    occupied = [folder for folder in folders if saved_in(folder)]
    if occupied and not overwrite:
        raise refusal("ZR329", occupied=", ".join(map(str, occupied)))
    for folder in occupied:
        refuse_occupied(folder, None, overwrite=True)


def _run(command: list[str], folder: Path, label: str, console: Console, threads: int) -> tuple[int, str]:
    """(exit code, the log's last 400 lines). The whole log goes to folder/log.txt, its last line to the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    tail: collections.deque[str] = collections.deque(maxlen=400)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"PYTHONUNBUFFERED": "1"}
    with open(folder / "log.txt", "w") as log, console.status(plain(f"{label}: starting")) as status:
        log.write(" ".join(command) + "\n")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        child = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        try:
            for line in child.stdout:
                log.write(line)
                tail.append(line.rstrip("\n"))
                if line.strip():
                    status.update(plain(f"{label}: {line.strip()[:100]}"))
                if line.startswith("{'loss'") and not console.is_terminal:  # where no status moves
                    console.print(plain(f"{label}: {line.strip()}"), soft_wrap=True)
            return child.wait(), "\n".join(tail)
        finally:
            if child.poll() is None:  # interrupted: a killed launcher would leave its workers behind
                os.killpg(child.pid, signal.SIGTERM)
                child.wait()
