"""The programs of benchmarks/throughput.py on two processes: same rows, same loss; another rate is noticed."""

from __future__ import annotations

import pytest

from benchmarks import throughput
from benchmarks.throughput_inputs import job_of


def test_the_programs_train_the_same_rows_to_the_same_loss(two, tmp_path):
    job = job_of(throughput.QUICK, tmp_path) | {"strategy": "zero2"}
    turn = {name: throughput.run(two, name, job, throughput.QUICK) for name in throughput.PROGRAMS}
    throughput.check(turn, "zero2")
    # same batches, weights, optimizer and rates: the bare loop ends where the recipe does, up to bf16
    assert turn["engine"]["held_out_loss"] == pytest.approx(turn["recipe"]["held_out_loss"], rel=2e-3)
    turn["engine"] = throughput.run(two, "engine", job | {"learning_rate": 1e-3}, throughput.QUICK)
    with pytest.raises(throughput.Disagreement, match="held-out losses of engine"):
        throughput.check(turn, "zero2")
