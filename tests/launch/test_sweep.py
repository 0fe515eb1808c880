"""A sweep of two values, one of which is refused, and its report; one that is stopped; `tune` with real runs."""

import json
import os
import shutil
import signal

import psutil
import pytest
import yaml

from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, write_recipe
from tests.helpers.two_ranks import run_forked, start_tool
from zero_recipes.metrics.read_runs import read_runs
from zero_recipes.metrics.schema import Metrics
from zero_recipes.tools import main as cli
from zero_recipes.tools import sweep, tune
from zero_recipes.tools.report import read


def test_one_value_runs_and_the_other_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep, "run_logged", run_forked)
    argv = ["sweep", str(write_recipe(tmp_path, max_steps=4)), "--strategies", "zero2", "--output_dir"]
    argv += [str(tmp_path / "out"), "--set", "warmup_steps=-1,1", "--set", "max_length=64"]
    assert cli.main(argv) == 0
    assert "2 runs: " in capsys.readouterr().out
    ran, refused = sorted(read_runs(tmp_path / "out"), key=lambda run: run.status)
    assert (ran.status, refused.status) == ("ok", "refused")
    assert ran.max_length == 64 and ran.swept == {"warmup_steps": 1, "max_length": 64} and len(ran.loss_history) == 4
    resolved = yaml.safe_load((ran.folder / "recipe.resolved.yaml").read_text())
    assert (resolved["warmup_steps"], resolved["max_length"]) == (1, 64), "the run had other keys"
    assert cli.main(["report", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    swept = {row["swept"]["warmup_steps"]: row for row in found}
    assert swept[1]["communication_bytes"] > 0
    assert read.table_rows([refused])[0]["code"] == swept[-1]["code"]


@pytest.mark.launch
@pytest.mark.parametrize("run", [run_forked, grid(sweep.run_logged)])
def test_out_of_memory_on_rank_1(tmp_path, monkeypatch, run):
    monkeypatch.setattr(sweep, "run_logged", run)
    monkeypatch.setenv("KILL", "memory:1:3")
    monkeypatch.setenv("MASTER_PORT", "1")  # of another launcher, in whose shell this one is typed
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setattr(sweep, "SCRIPT", ROOT / "tests" / "helpers" / "interrupted.py")
    ended = sweep.sweep(write_recipe(tmp_path), ["zero2"], 2, tmp_path / "out", [])
    assert ended == {"zero2": "oom"}
    row = json.loads((tmp_path / "out" / "zero2" / "metrics.json").read_text())
    assert row["status"] == "oom" and "out of memory" in row["error"]
    failure = row["failure"]
    assert (failure["phase"], failure["rank"]) == ("train", 1)
    assert failure["largest_memory"].keys() >= {"params", "grads", "optimizer"}
    sizes = list(failure["largest_memory"].values())
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    assert row["parameters"] > 0 and row["strategy"] == "zero2", "what rank 0 knew of the run was lost"
    assert json.loads((tmp_path / "out" / "zero2" / "failure.rank1.json").read_text())["traceback"]
    assert len(row["loss_history"]) == 2 and all(row["loss_history"]), "the losses up to the crash were lost"


WAITING = "import os, signal; print(os.getpid(), file=open('ranks', 'w')); signal.pause()"


@pytest.mark.parametrize("verb", ["sweep", grid("tune")])
def test_a_sweep_that_is_stopped_leaves_no_process(tmp_path, verb):
    """As a scheduler or `kill` stops it: SIGTERM to the sweep alone."""
    for name in ("accelerate_configs", "ds_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "run_sft.py").write_text(WAITING)
    os.mkfifo(tmp_path / "ranks")
    keys = {"max_length": 64, "per_device_train_batch_size": 1}  # `tune` has few candidates to plan
    argv = [verb, str(write_recipe(tmp_path, **keys)), "--strategies", "ddp"]
    running = start_tool(argv, tmp_path)
    with os.fdopen(os.open(tmp_path / "ranks", os.O_RDWR)) as ranks:
        started = [psutil.Process(int(ranks.readline())) for _ in range(2)]
    running.terminate()
    running.join(60)
    assert running.exitcode == 128 + signal.SIGTERM
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_what_runs_is_measured_and_written_and_what_does_not_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep, "run_logged", run_forked)
    monkeypatch.setattr(tune, "FIRST_SECONDS", 0.0)
    keys = {"max_length": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}  # one split, no packs
    recipe = write_recipe(tmp_path, save_model=True, eval_strategy="steps", eval_steps=1, sample_prompts=2, **keys)
    argv = ["tune", str(recipe), "--strategies", "zero2,zero2_autocast", "--output_dir", str(tmp_path / "runs")]
    assert cli.main(argv) == 0
    told, new = capsys.readouterr().out, recipe.with_suffix(".tuned.yaml")
    ran = Metrics.read(tmp_path / "runs" / "zero2" / "metrics.json")
    assert len(ran.loss_history) == 12 and not ran.eval_history and not list((tmp_path / "runs").rglob("*.safetensors"))
    assert "zero2_autocast, unchanged: refused" in new.read_text() and "ZR2031" in told
    assert yaml.safe_load(new.read_text()) == yaml.safe_load(recipe.read_text())
    assert cli.main(["check", str(new), "--config_file", "zero2.yaml"]) == 0
