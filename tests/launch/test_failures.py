"""A run that fails leaves a row, not a crash: out of memory on rank 1, a refusal; through sweep."""

import json

import pytest

from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.cli.sweep import sweep
from zero_recipes.metrics.failure import failed_row

pytestmark = pytest.mark.launch


def test_out_of_memory_on_rank_1(tmp_path, monkeypatch):
    monkeypatch.setenv("KILL", "memory:1:3")
    script = ROOT / "tests" / "helpers" / "killed.py"
    ended = sweep(write_recipe(tmp_path), ["zero2"], 2, tmp_path / "out", [], script=script)
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
