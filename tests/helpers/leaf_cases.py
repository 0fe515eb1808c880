"""Cases of tests/helpers/group.py: runs whose collectives and leaf modules are counted."""

import time
from collections import Counter

from tests.helpers import cases
from tests.helpers.tools import before
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.communication import CommunicationCounter
from zero_recipes.training.trainer import ZeroSFTTrainer


def train_counted(argv: list[str], left_out: str | None = None) -> dict:
    """metrics.json's losses, norms and bytes, the calls of each collective in the last step that is counted, and when
    each step began: seconds of this clock, and of this process's CPU time. `left_out`: as of `cases.train`."""
    calls = [Counter()]
    wall = []
    cpu = []
    leaves = []

    def count(_, collective, *__):
        calls[-1][collective] += 1

    def mark(*_):
        wall.append(time.perf_counter())
        cpu.append(time.process_time())

    def look(*_, model, **__):
        leaves.append(sum(getattr(module, "_z3_leaf", False) for module in model.modules()))

    with (
        before(CommunicationCounter, "_add", count),
        before(CommunicationCounter, "end_step", lambda _: calls.append(Counter())),
        before(ZeroSFTTrainer, "training_step", mark),
        before(StageMetricsCallback, "on_train_begin", look),
    ):
        metrics = cases.train(argv, left_out)["metrics"]
    kept = ("loss_history", "grad_norm_history", "communication_bytes_per_step")
    found = {key: metrics[key] for key in kept}
    return found | {"calls": calls[-2], "wall": wall, "cpu": cpu, "leaves": leaves[0]}
