"""The programs of docs/your_own.md, "In your own program", run as printed; `zero-recipes report` reads their files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero_recipes.checkpoint.save import checkpoint_fault
from zero_recipes.metrics.read_runs import read_runs

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHERS = {1: [sys.executable], 2: [sys.executable, *TORCHRUN]}


def programs() -> list[str]:
    page = (ROOT / "docs" / "your_own.md").read_text()
    return re.findall(r"```python\n(.*?)```", page.partition("## In your own program")[2], re.DOTALL)


@pytest.mark.launch
@pytest.mark.parametrize("processes", LAUNCHERS)
def test_the_programs_of_the_page(tmp_path, processes):
    plain, sft = programs()
    assert all(len(ast.parse(text).body) <= 10 for text in (plain, sft)), "ten statements each"
    script = tmp_path / "both.py"
    script.write_text(f"{plain}\n{sft}".replace('"output/', f'"{tmp_path}/'))
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*LAUNCHERS[processes], script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = {run.name: run for run in read_runs(tmp_path)}
    for name in ("plain", "sft"):
        run = runs[name]
        assert (run.status, run.world_size, run.precision) == ("ok", processes, "fp32")
        assert run.strategy == ("single" if processes == 1 else "ddp") and run.model == "tiny_world/base"
        assert len(run.loss_history) == 4 and all(0 < loss < 9 for loss in run.loss_history)
        assert 0 < run.tokens.supervised < run.tokens.non_padding < run.tokens.all
        assert run.model_state_bytes[0].optimizer >= 8 * run.parameters and run.phase_seconds.train > 0
        sent = {"all_reduce": 4 * run.parameters} if processes > 1 else {}
        assert run.communication_bytes_per_step == sent
    assert [path.name for path in (tmp_path / "sft").glob("checkpoint-*")] == ["checkpoint-4"]
    assert checkpoint_fault(tmp_path / "sft" / "checkpoint-4") is None
    report = [sys.executable, "-m", "zero_recipes.cli.main", "report", str(tmp_path)]
    assert subprocess.run(report, cwd=ROOT, capture_output=True, timeout=120).returncode == 0
