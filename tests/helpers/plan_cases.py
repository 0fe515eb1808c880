"""Cases of tests/helpers/group.py for the planner: what a run makes of its plan, and what it really allocates.

The latter by torch.profiler, not by the planner's tracker.
"""

import dataclasses
import gc
from unittest import mock

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

import run_sft
from tests.helpers.cases import train
from tests.helpers.tools import before, without
from zero_recipes.checks import predicted
from zero_recipes.core.findings import Refusal
from zero_recipes.core.process import rank
from zero_recipes.metrics.callback import StageMetricsCallback

STEP = "plan_cases: a step begins"


def train_profiled(argv: list[str]) -> dict:
    """`train`, with how far each step's live bytes rise above its beginning: {"rises": [[low, high]], "metrics"}."""

    def begin(*_, **__) -> None:
        gc.collect()  # tensors in reference cycles live until Python looks for them, at moments that nobody plans
        with record_function(STEP):
            pass

    gc.collect()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    masked = without("zero_recipes.engine.attention.attend_by_row")  # the plan counts a mask
    products = without("zero_recipes.engine.speed.cpu_products.multiply_in_fp32")  # no GPU has its temporary tensors
    with masked, products, before(StageMetricsCallback, "on_step_begin", begin), profiler as profiled:
        result = train(argv)
    return {"rises": rises(profiled.profiler.kineto_results.experimental_event_tree()), "metrics": result["metrics"]}


def rises(tree) -> list[list[int]]:
    """Bytes, [at least, at most], between what lives at each step's beginning and the most that lives within it.

    The profiler does not hear what gloo's threads free (torch c10/core/CPUAllocator.cpp `ProfiledCPUMemoryReporter`),
    and it is chance whether such a thread is the last that holds a collective's tensor. A tensor whose end was not
    heard counts in the second number only, from its beginning until its address is used again.
    """
    changes, begins = [], []
    for event in _flat(tree):
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == STEP:
            begins.append(event.start_time_ns)
    changes.sort(key=lambda change: change[0])
    silent = _never_heard_to_end(changes)

    begins.sort()
    rises, heard, unheard, start = [], 0, {}, 0
    for number, (time, address, size) in enumerate(changes):
        while len(rises) < len(begins) and time >= begins[len(rises)]:
            rises.append([0, 0])
            start, unheard = heard, {}
        unheard.pop(address, None)
        if number in silent:
            unheard[address] = size
        else:
            heard += size
        if rises:
            least = heard - start
            rises[-1] = [max(rises[-1][0], least), max(rises[-1][1], least + sum(unheard.values()))]
    return rises


def _flat(tree):
    stack = list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        yield event


def _never_heard_to_end(changes: list[tuple[int, int, int]]) -> set[int]:
    """Places in `changes` of the allocations that no free of the same address follows before its next allocation."""
    open_at, silent = {}, set()
    for number, (_, address, size) in enumerate(changes):
        if size > 0:
            if address in open_at:
                silent.add(open_at[address])
            open_at[address] = number
        else:
            open_at.pop(address, None)
    return silent | set(open_at.values())


def plan_for_small_gpus(argv: list[str], program: str, capacities: list[int]) -> dict:
    """What `program`, in the planner's place, makes of a run on each rank where its GPU has so many bytes."""
    run = dataclasses.replace(run_sft.read_run(argv), device="cuda")
    planner, started = predicted._planner, []

    def start(*arguments):
        started.append(rank())
        return planner(*arguments)

    card = {"rank": rank(), "total": capacities[rank()], "workspace": 0}
    with (
        mock.patch.object(predicted, "PLANNER", ("-c", program)),
        mock.patch.object(predicted, "_planner", start),
        mock.patch.object(predicted, "card", lambda: card),
    ):
        try:
            with predicted.planning(run) as planned:
                return {"peak": planned().peak_memory_bytes, "refused": None, "started": len(started)}
        except Refusal as refusal:
            return {"peak": None, "refused": refusal.codes, "started": len(started)}
