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
    """Largest sum of what lives, after the mark. What was there before the profiler does not count.

    By address: events of several threads can bear the same time, and a free then stand behind the allocation that has
    taken its place.
    """
    allocations, begin, stack = [], None, list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == BEGIN:
            begin = event.start_time_ns
    live: dict[int, int] = {}
    late: list[tuple[int, int]] = []  # frees that are still to come, of places taken again
    total = peak = 0
    for time, address, size in sorted(allocations, key=lambda event: event[0]):
        if size > 0:
            if address in live:
                late.append((address, live[address]))
                total -= live[address]
            live[address] = size
            total += size
        elif (address, -size) in late:
            late.remove((address, -size))
        elif address in live:
            total -= live.pop(address)
        if time >= begin:
            peak = max(peak, total)
    return peak
