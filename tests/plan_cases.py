"""Cases for tests/test_plan_accuracy.py: what a real run allocates, by torch.profiler, not by the planner's tracker."""

from __future__ import annotations

import gc
import itertools

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from tests.cases import train
from zero_recipes.metrics import StageMetricsCallback

STEP = "plan_cases: a step begins"


def train_profiled(argv: list[str]) -> dict:
    """`train`, with how far each step's live allocations rise above its beginning: {"rises": [bytes], "metrics"}."""
    gc.collect()
    original = StageMetricsCallback.on_step_begin

    def on_step_begin(self, *arguments, **keywords):
        gc.collect()  # tensors in reference cycles live until Python looks for them, at moments that nobody plans
        with record_function(STEP):
            return original(self, *arguments, **keywords)

    StageMetricsCallback.on_step_begin = on_step_begin
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = train(argv)
    finally:
        StageMetricsCallback.on_step_begin = original
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    return {"rises": _rises(tree), "metrics": result["metrics"]}


def _rises(tree) -> list[int]:
    """Largest sum of what lives less what lived at the step's beginning, of each step.

    torch's reporter (c10/core/CPUAllocator.cpp `ProfiledCPUMemoryReporter`) does not hear what gloo's threads free, so
    that its sum drifts upwards from step to step; within a step it is right.
    """
    sums, begins, stack = [], [], list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            sums.append((event.start_time_ns, event.extra_fields.total_allocated))
        elif event.name == STEP:
            begins.append(event.start_time_ns)
    sums.sort()
    edges = [*sorted(begins), sums[-1][0] + 1]
    return [
        max(total for time, total in sums if begin <= time < end) - [total for time, total in sums if time < begin][-1]
        for begin, end in itertools.pairwise(edges)
    ]
