"""The programs of benchmarks/throughput.py on two processes: they train the same, and the bare loop is the recipe's."""

from __future__ import annotations

import pytest

from benchmarks import throughput
from benchmarks.throughput_inputs import job_of
from tests.helpers.group import Group


@pytest.fixture(scope="module")
def group():
    group = Group(2)
    yield group
    group.close()


@pytest.mark.parametrize(
    "strategy", ["zero2", *(pytest.param(s, marks=pytest.mark.grid) for s in ("ddp", "zero0", "zero1", "zero3"))]
)
def test_the_four_programs_train_the_same_rows_to_the_same_loss(group, tmp_path, strategy):
    job = job_of(throughput.QUICK, tmp_path) | {"strategy": strategy}
    turn = {name: throughput._run(group, name, job, throughput.QUICK) for name in ("trl", "recipe", "engine", "plain")}
    throughput.check(turn, strategy)
    assert len(turn["trl"]["row_lengths"]) == 16 * throughput.QUICK.steps
    # same batches, weights, optimizer and rates: the bare loop ends where the recipe does, up to bf16
    bare, recipe = turn["engine"]["held_out_loss"], turn["recipe"]["held_out_loss"]
    assert bare == pytest.approx(recipe, rel=2e-3)
    found = throughput.summary([turn])
    assert found["programs"]["trl"]["padding"] > 0.1 > found["programs"]["recipe"]["padding"]


def test_other_learning_rates_are_noticed(group, tmp_path):
    job = job_of(throughput.QUICK, tmp_path) | {"strategy": "zero2"}
    turn = {"recipe": throughput._run(group, "recipe", job, throughput.QUICK)}
    turn["engine"] = throughput._run(group, "engine", job | {"learning_rate": 1e-3}, throughput.QUICK)
    with pytest.raises(throughput.Disagreement, match="the loss of engine"):
        throughput.check(turn, "zero2")
