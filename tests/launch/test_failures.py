"""A run that fails leaves a row, not a crash: out of memory on rank 1, rank 0 killed, a refusal; through sweep."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.cli.sweep import sweep
from zero_recipes.metrics.failure import failed_row

pytestmark = pytest.mark.launch

OUT_OF_MEMORY = """
if os.environ["RANK"] == "1" and len(self.stage_metrics.losses) == 2:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
import run_sft

original = run_sft.train


def train(run):
    import torch
    from zero_recipes.training.trainer import ZeroSFTTrainer

    step = ZeroSFTTrainer.training_step

    def training_step(self, *arguments, **keywords):
{act}
        return step(self, *arguments, **keywords)

    ZeroSFTTrainer.training_step = training_step
    return original(run)


run_sft.train = train
run_sft.main(sys.argv[1:])
"""


def sabotaged(folder: Path, act: str) -> Path:
    """A run_sft.py whose training step does `act` in the third step."""
    script = folder / "sabotaged.py"
    script.write_text(SCRIPT.format(root=str(ROOT), act=textwrap.indent(act.strip(), " " * 8)))
    return script


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("failures"), max_steps=6)


def test_out_of_memory_on_rank_1(recipe, tmp_path):
    script = sabotaged(tmp_path, OUT_OF_MEMORY)
    ended = sweep(recipe, ["zero2"], 2, tmp_path / "out", [], script=script)
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


def test_a_refusal_that_only_the_launchers_closing_table_holds(tmp_path):
    """torchrun stops rank 0 (SIGTERM) when rank 1 has refused first: seen on a busy machine."""
    table = "Failures:\n  exitcode  : -15 (pid: 7)  (SIGTERM)\n  traceback : Signal 15 (SIGTERM) received by PID 7\n"
    table += "  exitcode  : 2 (pid: 8)\n  traceback : refused: a\n      why: b\n     fix: c\n====\n"
    row = failed_row(tmp_path, "zero1", 1, table)
    assert (row.status, row.error) == ("refused", "refused: a why: b fix: c")
