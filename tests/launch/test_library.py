"""The programs of docs/your_own.md, "In your own program", and docs/lesson.ipynb run as printed."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT
from tests.helpers.two_ranks import environment_of_launch, two_ranks
from zero_recipes.checkpoint.save import checkpoint_fault
from zero_recipes.metrics.read_runs import read_runs
from zero_recipes.tools import main as cli


def programs() -> list[str]:
    page = (ROOT / "docs" / "your_own.md").read_text()
    return re.findall(r"```python\n(.*?)```", page.partition("## In your own program")[2], re.DOTALL)


# of fp32: bytes a parameter of a rank's master and Adam's moments, and the collectives that carry 4 bytes a parameter
HELD = {"ddp": (8, {"all_reduce"}), "zero2": (6, {"all_reduce", "all_gather"})}


@pytest.mark.parametrize("strategy", [grid("ddp"), "zero2"])
def test_the_programs_of_the_page(tmp_path, monkeypatch, strategy):
    plain, sft = programs()
    assert all(len(ast.parse(text).body) <= 10 for text in (plain, sft)), "ten statements each"
    text = f"{plain}\n{sft}".replace('"output/', f'"{tmp_path}/')
    (tmp_path / "both.py").write_text(text.replace('report_to="none"', 'report_to="none", use_cpu=True'))
    monkeypatch.chdir(ROOT)
    launched = {"ACCELERATE_USE_CPU": "true"}
    if strategy == "zero2":
        launched = environment_of_launch(ROOT / "accelerate_configs" / "zero2.yaml", 2)
    ended = two_ranks([], tmp_path, launched, script=str(tmp_path / "both.py"))
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr[-3000:]
    runs = {run.name: run for run in read_runs(tmp_path)}
    bytes_held, collectives = HELD[strategy]
    for name in ("plain", "sft"):
        run = runs[name]
        assert (run.status, run.world_size, run.precision, run.strategy) == ("ok", 2, "fp32", strategy)
        assert run.model == "tiny_world/base"
        assert len(run.loss_history) == 4 and all(0 < loss < 9 for loss in run.loss_history)
        assert 0 < run.tokens.supervised < run.tokens.non_padding < run.tokens.all
        assert run.model_state_bytes[0].optimizer >= bytes_held * run.parameters and run.phase_seconds["train"] > 0
        sent = {name: round(size / run.parameters) for name, size in run.communication_bytes_per_step.items()}
        assert sent == dict.fromkeys(collectives, 4)
    assert [path.name for path in (tmp_path / "sft").glob("checkpoint-*")] == ["checkpoint-4"]
    assert checkpoint_fault(tmp_path / "sft" / "checkpoint-4") is None
    assert cli.main(["report", str(tmp_path)]) == 0


@pytest.mark.grid
def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "docs" / "lesson.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "lesson.py").write_text("\n\n".join(code))
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(tmp_path / "lesson.py")], cwd=ROOT, env=environment, check=True)
