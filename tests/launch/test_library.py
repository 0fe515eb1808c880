"""The programs of docs/your_own.md, "In your own program", run as printed; `zero-recipes report` reads their files."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.grid import grid
from zero_recipes.checkpoint.save import checkpoint_fault
from zero_recipes.core.process import free_port
from zero_recipes.metrics.read_runs import read_runs

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "single": [],
    "ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "zero2": ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero2.yaml"],
}


def programs() -> list[str]:
    page = (ROOT / "docs" / "your_own.md").read_text()
    return re.findall(r"```python\n(.*?)```", page.partition("## In your own program")[2], re.DOTALL)


@pytest.mark.launch
@pytest.mark.parametrize("strategy", [grid("single"), "ddp", "zero2"])
def test_the_programs_of_the_page(tmp_path, strategy):
    plain, sft = programs()
    assert all(len(ast.parse(text).body) <= 10 for text in (plain, sft)), "ten statements each"
    script = tmp_path / "both.py"
    text = f"{plain}\n{sft}".replace('"output/', f'"{tmp_path}/')
    script.write_text(text.replace('report_to="none"', 'report_to="none", use_cpu=True'))
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {} if strategy == "zero2" else {"ACCELERATE_USE_CPU": "true"}
    port = ["--main_process_port", str(free_port())] if strategy == "zero2" else []
    command = [sys.executable, *LAUNCHERS[strategy], *port, script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = {run.name: run for run in read_runs(tmp_path)}
    for name in ("plain", "sft"):
        run = runs[name]
        ranks = 1 if strategy == "single" else 2
        assert (run.status, run.world_size, run.precision, run.strategy) == ("ok", ranks, "fp32", strategy)
        assert run.model == "tiny_world/base"
        assert len(run.loss_history) == 4 and all(0 < loss < 9 for loss in run.loss_history)
        assert 0 < run.tokens.supervised < run.tokens.non_padding < run.tokens.all
        bytes_per_parameter = 6 if strategy == "zero2" else 8  # a half of the fp32 master and of Adam's two moments
        assert (
            run.model_state_bytes[0].optimizer >= bytes_per_parameter * run.parameters
            and run.phase_seconds["train"] > 0
        )
        sent = {"single": {}, "ddp": {"all_reduce"}, "zero2": {"all_reduce", "all_gather"}}[strategy]
        assert {name: round(size / run.parameters) for name, size in run.communication_bytes_per_step.items()} == (
            dict.fromkeys(sent, 4)
        )
    assert [path.name for path in (tmp_path / "sft").glob("checkpoint-*")] == ["checkpoint-4"]
    assert checkpoint_fault(tmp_path / "sft" / "checkpoint-4") is None
    report = [sys.executable, "-m", "zero_recipes.cli.main", "report", str(tmp_path)]
    assert subprocess.run(report, cwd=ROOT, capture_output=True, timeout=120).returncode == 0
