"""torch's CUDA build on a machine without a GPU: what a user's laptop has, and a pod whose GPU does not answer.

`make cuda-build` installs that build and runs this file, and all unit and planner tests, under it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run_sft

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
QUICK = ["--max_steps", "2", "--sample_prompts", "0", "--eval_strategy", "no", "--save_model", "false"]

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


def test_the_whole_preflight_takes_the_cpu(tmp_path, monkeypatch, capfd):
    """Its parts are tested one by one, under whichever build; here they come together under this one."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.chdir(ROOT)
    run = run_sft.prepare(["recipes/tiny.yaml", "--output_dir", str(tmp_path)])
    assert (run.device, run.settings.use_cpu, os.environ["DS_ACCELERATOR"]) == ("cpu", True, "cpu")
    assert "why:" not in capfd.readouterr().out  # no finding


@pytest.mark.parametrize("strategy", ["single", "zero3"])
def test_a_run_trains_on_the_cpu(tmp_path, strategy):
    script = ["run_sft.py", "recipes/tiny.yaml", *QUICK, "--output_dir", str(tmp_path)]
    launch = [str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    command = [*([sys.executable] if strategy == "single" else launch), *script]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["status"], metrics["device"], metrics["strategy"]) == ("ok", "cpu", strategy)
