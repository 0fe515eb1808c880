"""Cases for tests/test_plan_accuracy.py: what a real run allocates, by torch.profiler, not by the planner's tracker."""

from __future__ import annotations

import gc

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from tests.cases import train
from zero_recipes.metrics import StageMetricsCallback

BEGIN = "plan_cases: training begins"


def train_profiled(argv: list[str]) -> dict:
    """`train`, with the largest sum of live allocations in its steps: {"allocated": bytes, "metrics": ...}."""
    gc.collect()
    original = StageMetricsCallback.on_train_begin

    def on_train_begin(self, *arguments, **keywords):
        result = original(self, *arguments, **keywords)
        with record_function(BEGIN):
            return result

    StageMetricsCallback.on_train_begin = on_train_begin
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = train(argv)
    finally:
        StageMetricsCallback.on_train_begin = original
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    return {"allocated": _peak(tree), "metrics": result["metrics"]}


def _peak(tree) -> int:
    """Largest sum of what lives after the mark; what was there before the profiler does not count.

    torch's reporter keeps the sum itself (c10/core/CPUAllocator.cpp `ProfiledCPUMemoryReporter`), under a lock: events
    of several threads need not be put in order.
    """
    sums, begin, stack = [], None, list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            sums.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif event.name == BEGIN:
            begin = event.start_time_ns
    _, first, size = min(sums)
    return max(total for time, total, _ in sums if time >= begin) - (first - size)
