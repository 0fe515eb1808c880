"""The simulation's own parts: tracker and allocator by hand, and names of libraries that patches replace."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_recipes.plan.simulator.device import MIB, CachingAllocator, reserved_peak
from zero_recipes.plan.simulator.tracker import LiveStorages, Observed


@pytest.mark.private
def test_the_gpus_own_kernels_are_still_asked_for_by_name():
    from trl.kernels import chunked_logprob

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        assert callable(getattr(chunked_logprob, name))
    assert not chunked_logprob._use_triton(torch.device("cpu"))  # nor for a device that only stands for a GPU


def test_every_storage_is_counted_once_and_until_its_end():
    tracker = LiveStorages("cpu", block=512)
    with FakeTensorMode(), Observed(tracker):
        tracker.enter("forward")
        a = torch.empty(100, dtype=torch.float32)  # 400 bytes: one block
        view = a.view(10, 10)
        assert tracker.live == 512
        b = a + 1
        del a
        assert tracker.live == 1024  # the view keeps it
        tracker.assign([b], "grads")
        del view
        assert tracker.live == 512 and tracker.parts["grads"] == 512
        tracker.enter("backward")
        c = torch.empty(1000, dtype=torch.bfloat16)
        assert tracker.live == 512 + 2048
        del b, c
    assert tracker.live == 0
    assert tracker.peaks["forward"] == 1024 and tracker.operators["forward"] == "aten.add.Tensor"
    assert tracker.peaks["backward"] == 2560 == sum(tracker.at_peak["backward"].values())
    assert tracker.at_peak["backward"]["grads"] == 512 and tracker.at_peak["backward"]["activations"] == 2048


def test_numbers_are_answered_as_in_a_healthy_step_and_matrix_products_are_counted():
    with FakeTensorMode(), Observed() as observed:
        assert torch.empty(1).item() == 0.0 and torch.empty(1, dtype=torch.uint8).item() == 0
        assert torch.empty(1, dtype=torch.int64).item() == 1 and not torch.empty(1, dtype=torch.bool)
        observed.counts_flops = True
        torch.empty(3, 4) @ torch.empty(4, 5) + 1
    assert observed.flops == 2 * 3 * 4 * 5


def test_segments_are_those_of_the_caching_allocator():
    model = CachingAllocator()

    def after(*changes: tuple) -> int:
        """MiB reserved after (number, MiB, stream) are allocated, or a number is given back."""
        for number, *what in changes:
            if what:
                model.allocate(number, int(what[0] * MIB), what[1])
            else:
                model.release(number)
        return model.reserved // MIB

    assert after((1, 0.1, 0), (2, 0.2, 0), (9, 1, 0), (10, 0.5, 0)) == 2  # small blocks share a segment
    assert after((3, 3, 0)) == 22
    assert after((4, 11, 0)) == 22  # of the large segment's rest
    assert after((5, 25.5, 0)) == 48  # rounded up
    assert after((6, 5, 0), (4,), (3,), (7, 13, 0)) == 48  # two neighbours that are free join
    assert after((8, 2, 7)) == 68  # another stream takes nothing of them
    model.release(5)
    model.empty()  # gives back what is free as a whole
    assert after() == 42 and model.peak == 68 * MIB


def test_the_peak_counts_from_the_first_step_on():
    events = [("alloc", 1, 100 * MIB, 0), ("free", 1), ("empty",), ("phase", "forward"), ("alloc", 2, 30 * MIB, 0)]
    assert reserved_peak(events, "forward") == 30 * MIB
