"""Cases of tests/launch/test_group.py: ranks that meet (as a program) and that share what one of them did."""

import itertools
import json
import os
import signal
import sys
from datetime import timedelta
from unittest import mock

import torch
from accelerate import PartialState
from torch import distributed

from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.process import leave
from zero_recipes.core.run_end import RunFailed, print_ending
from zero_recipes.engine import group
from zero_recipes.metrics import callback, probe, schema
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.training import divergence

TIMEOUT = timedelta(seconds=1234)


def main(order: dict) -> int:
    """One rank: meets the others, and may die then."""
    if order.get("reduces wrongly"):
        distributed.all_reduce = lambda tensor: None
    try:
        group.rendezvous("gloo", TIMEOUT, order.get("join_seconds", 60), order.get("exchange_seconds", 60))
    except Refusal as refusal:
        return print_ending(refusal)
    if "dies" in order:
        group.once(lambda: os.kill(os.getpid(), signal.SIGKILL), "plans the run")
    made = distributed.distributed_c10d._get_default_group()
    assert made._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    print("met", distributed.get_world_size(), flush=True)
    return 0


class Diverging(RunFailed):
    """A failure that the run knows."""


FAULTS = {
    "refusal": Refusal([Finding("ZR000", "what", "why", "fix", trace="a library's")]),
    "known": Diverging("lost"),
    "unknown": OSError("no room"),
}


def shared(fault: str | None, on: int) -> dict[str, str]:
    """What this rank gets of each way to share, where rank `on` fails of `fault`."""
    me, group.READ_SECONDS = distributed.get_rank(), 60.0

    def work() -> int:
        if fault is not None and me == on:
            raise FAULTS[fault]
        return 10 * me

    def writes() -> str:
        with group.rank_0_writes():
            work() if me == 0 else None
        return "went on"

    ways = {
        "agree": lambda: group.agree(work),
        "once": lambda: group.once(work, "plans the run"),
        "once_per_node": lambda: group.once_per_node(work, "prepares the data of this machine"),
        "rank_0_writes": writes,
    }
    return {name: _outcome(way) for name, way in ways.items()}


def failing_on_both(faults: list[str]) -> str:
    """What this rank hears where each fails of its own fault."""

    def work() -> None:
        raise FAULTS[faults[distributed.get_rank()]]

    group.READ_SECONDS = 60.0
    return _outcome(lambda: group.agree(work))


def logged(peaks: list[dict], tokens: list[list[int]]) -> list[dict[str, float]]:
    """What this rank logs after each of some steps of two seconds, of which it has had tokens of its own; a plan says
    what they need."""
    me = distributed.get_rank()
    plan = schema.PredictedMetrics(peak_memory_bytes=77)
    metrics = StageMetricsCallback(predicted=plan)
    metrics.identity = schema.RunIdentity(name="run", strategy="ddp", world_size=2, device="cpu")
    metrics.device = "cpu"
    metrics.used = probe.UsedFlops(metrics.identity)
    metrics.communication = mock.MagicMock()
    metrics.communication.median.return_value = {"all_gather": 3, "all_reduce": 4}
    found = []
    with mock.patch.object(callback, "peak_memory", lambda device: peaks[me]):
        for count in tokens[me]:
            metrics.count_tokens({"input_ids": torch.ones(1, count, dtype=torch.long)})
            metrics.steps.steps.append((0.0, 2.0))
            found.append(metrics.since_last_log())
    return found


def skipped(call: str, on: int, first_call: int) -> str:
    """What this rank gets where rank `on` goes past one call, and calls the next. `first_call`: no earlier one's."""

    def rows() -> str:
        return "rows"

    def plan() -> str:
        return "plan"

    calls = {"agree": lambda: group.agree(rows), "once": lambda: group.once(rows, "reads the rows")}
    numbers = mock.patch.object(group, "_calls", itertools.count(first_call))
    with numbers, mock.patch.object(group, "READ_SECONDS", 1.0):
        if distributed.get_rank() == on:
            return _outcome(lambda: group.once(plan, "plans the run"))
        return _outcome(calls[call])


def has_nonfinite_weights(on: int) -> bool:
    """What this rank hears where a weight of rank `on` alone is NaN."""
    PartialState(cpu=True)
    model = torch.nn.Linear(2, 2)
    if distributed.get_rank() == on:
        model.weight.data[1, 1] = torch.nan
    return divergence.has_nonfinite_weights(model)


def figures_of_a_step(losses: list[float], norms: list[float]) -> tuple[float, float]:
    """(loss, gradient norm) that this rank judges a step by, whose own are those of its place."""
    metrics, me = StageMetricsCallback(), distributed.get_rank()
    metrics.probe, metrics.communication = mock.MagicMock(), mock.MagicMock()
    metrics.losses.append(torch.tensor(losses[me]))
    metrics.norm = torch.tensor(norms[me])
    metrics.on_step_end(None, None, None)
    assert str(metrics.grad_norms) == str([norms[me]])
    return metrics.last_step


def _outcome(way) -> str:
    try:
        return str(way())
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    leave(main(json.loads(sys.argv[1])))
