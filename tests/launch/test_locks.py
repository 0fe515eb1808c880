"""A run changes its folder only while it holds it, and only once nothing can refuse it any more."""

import json
import os
import random
import shutil
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import cases, ending_cases
from tests.helpers.group import ENVIRONMENT, SERVER, start_server
from tests.helpers.interrupted import run_with_pauses
from tests.helpers.resuming import SAVED_AT, STEPS, resume_recipe
from tests.helpers.tiny import arguments, write_rows
from tests.helpers.tools import contents, flip
from zero_recipes.checkpoint.save import checkpoint_fault, content_fault
from zero_recipes.core.folder_lock import LOCK

RESUME = ("--resume_from_checkpoint", "true")


class Started(NamedTuple):
    """A process of run_sft.py without a launcher."""

    process: BaseProcess
    pauses: Connection
    errors: Path  # what it prints to stderr


def start(argv: list[str], folder: Path, pause: str = "") -> Started:
    """It waits where `pause` says: see `run_with_pauses`."""
    start_server()
    environment = os.environ | ENVIRONMENT
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    out, errors = (folder / f"{pause or 'plain'}.{stream}.txt" for stream in ("stdout", "stderr"))
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=run_with_pauses, args=(argv, [pause], theirs, environment, out, errors))
    process.start()
    theirs.close()
    return Started(process, ours, errors)


def wait_for(run: Started, place: str) -> None:
    """Raises EOFError where it has ended before."""
    assert run.pauses.poll(240), f"it does not come to {place!r}"  # a hang guard
    assert run.pauses.recv() == place


def end(run: Started) -> int:
    """Its exit code, once it may go on."""
    with suppress(BrokenPipeError):
        run.pauses.send("go on")
    run.process.join(240)  # a hang guard
    return run.process.exitcode


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file was written, and which one it is: a copy with the same bytes is another."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe, folder) of a whole run of two processes."""
    folder = tmp_path_factory.mktemp("saved")
    recipe = resume_recipe(folder, save_model=True)
    two.run(cases.train, argv=arguments(recipe, "zero2", folder / "whole"))
    return recipe, folder / "whole"


@pytest.fixture
def stopped(saved, tmp_path) -> Path:
    """The folder as if the run had been killed after its first checkpoint."""
    out = Path(shutil.copytree(saved[1], tmp_path / "out"))
    shutil.rmtree(out / f"checkpoint-{STEPS}")
    (out / "model.safetensors").unlink()
    (out / "metrics.json").unlink()
    return out


@pytest.mark.launch
def test_a_refused_resume_changes_nothing(saved, tmp_path):
    """It would go on from the checkpoint before the damaged one, resharded for one process; but with other rows."""
    recipe, whole = saved
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    flip(next((out / f"checkpoint-{STEPS}").rglob("mp_rank_00_model_states.pt")), random.Random(3))
    before = contents(out)
    rows = str(write_rows(tmp_path / "others", 20, seed=1))
    run = start(arguments(recipe, "zero2", out, *RESUME, "--dataset_name", rows), tmp_path)
    assert end(run) == 2
    assert contents(out) == before
    message = run.errors.read_text()
    assert f"{out}/checkpoint-{SAVED_AT} was trained on different rows [ZR727]" in message


@pytest.mark.launch
def test_of_two_runs_at_once_the_second_is_refused_and_touches_nothing(saved, stopped, tmp_path):
    """Both have looked at the folder; the first trains from a resharded copy of its own."""
    argv = arguments(saved[0], "zero2", stopped, *RESUME)
    second = start(argv, tmp_path, "prepared")
    wait_for(second, "prepared")
    first = start(argv, tmp_path, "step")
    wait_for(first, "step")
    assert (stopped / f"checkpoint-{SAVED_AT}-zero2-world1").is_dir()
    before = written(stopped)
    assert end(second) == 2
    assert "[ZR747]" in second.errors.read_text()
    assert written(stopped) == before
    assert end(first) == 0, first.errors.read_text()[-3000:]
    last = stopped / f"checkpoint-{STEPS}"
    assert checkpoint_fault(last) is None and content_fault(last) is None
    metrics = json.loads((stopped / "metrics.json").read_text())
    assert metrics["status"] == "ok" and metrics["resumed_at"] == [SAVED_AT]
    assert not list(stopped.glob("*-world1")) and not (stopped / LOCK).exists()


def test_a_run_that_looked_before_another_trained_to_its_end_trains_nothing(two, saved, stopped):
    recipe, whole = saved
    late = two.run(ending_cases.ending_after_another, argv=arguments(recipe, "zero2", stopped, *RESUME))[0]
    assert late["error"] is None and late["steps"] == []
    assert late["metrics"]["resumed_at"] == [SAVED_AT, STEPS]
    assert late["metrics"]["loss_history"] == json.loads((whole / "metrics.json").read_text())["loss_history"]
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_that_looked_at_an_empty_folder_is_refused_where_another_has_trained_since(two, saved, tmp_path):
    out = tmp_path / "out"
    late = two.run(ending_cases.ending_after_another, argv=arguments(saved[0], "zero2", out))[1]
    assert "[ZR702]" in late["error"][1] and late["steps"] == []
    assert late["metrics"]["status"] == "ok" and late["metrics"]["resumed_at"] == []
