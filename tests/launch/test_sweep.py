"""A sweep of two values, one of which is refused; and its report. A sweep that is stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import yaml

from tests.helpers.tiny import ROOT, write_recipe
from tests.helpers.two_ranks import run_of_sweep
from zero_recipes.cli import main as cli
from zero_recipes.cli import sweep
from zero_recipes.metrics.read_runs import read_runs
from zero_recipes.report import read

BUCKET = "zero_optimization.reduce_bucket_size"


def test_one_value_runs_and_the_other_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep, "_run", run_of_sweep)
    files = [ROOT / "accelerate_configs" / "zero2.yaml", ROOT / "ds_configs" / "zero2.json"]
    before = [path.read_bytes() for path in files]
    argv = ["sweep", str(write_recipe(tmp_path, max_steps=4)), "--strategies", "zero2", "--output_dir"]
    argv += [str(tmp_path / "out"), "--set", f"{BUCKET}=few,7e3", "--set", "max_length=64"]
    assert cli.main(argv) == 0
    assert "2 runs: " in capsys.readouterr().out
    ran, refused = sorted(read_runs(tmp_path / "out"), key=lambda run: run.status)
    assert (ran.status, refused.status) == ("ok", "refused")
    assert ran.max_length == 64 and ran.swept == {BUCKET: 7000, "max_length": 64} and len(ran.loss_history) == 4
    resolved = yaml.safe_load((ran.folder / "recipe.resolved.yaml").read_text())
    assert resolved["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == 7000, "the run had another ds_config"
    assert before == [path.read_bytes() for path in files]
    assert cli.main(["report", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    swept = {row["swept"][BUCKET]: row for row in found}
    assert swept[7000]["communication_bytes"] > 0
    assert read.table_rows([refused])[0]["code"] == swept["few"]["code"] == "ZR211"


WAITING = "import os, signal; print(os.getpid(), file=open('ranks', 'w')); signal.pause()"


def test_a_sweep_that_is_stopped_leaves_no_process(tmp_path):
    """As a scheduler or `kill` stops it: SIGTERM to the sweep alone."""
    for name in ("accelerate_configs", "ds_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "run_sft.py").write_text(WAITING)
    os.mkfifo(tmp_path / "ranks")
    command = [sys.executable, "-m", "zero_recipes.cli.main", "sweep", write_recipe(tmp_path), "--strategies", "zero2"]
    running = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with os.fdopen(os.open(tmp_path / "ranks", os.O_RDWR)) as ranks:
        started = [psutil.Process(int(ranks.readline())) for _ in range(2)]
    running.terminate()
    assert running.wait(timeout=60) == 128 + signal.SIGTERM
    assert psutil.wait_procs(started, timeout=10)[1] == []
