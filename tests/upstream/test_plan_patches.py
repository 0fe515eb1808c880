"""The simulation's own parts: each patch is still needed and stays in its process; tracker and allocator by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.tiny import ROOT
from zero_recipes.plan.simulator import device, patches
from zero_recipes.plan.simulator import parent as simulation
from zero_recipes.plan.simulator.device import MIB, CachingAllocator, reserved_peak
from zero_recipes.plan.simulator.tracker import LiveStorages, Observed

NEEDED = {
    "answer_for_number": "DataDependentOutputException",
    "no_kernels": "1",  # asked for where the process group starts
    "no_addresses": "1",  # one address for two tensors
    "no_pinned_memory": "AssertionError",
    "conversions_by_hand": "RuntimeError",
    "no_other_ranks": "DataDependentOutputException",
    "masks_by_shape": "True",  # a fake tensor is taken for a compiler's
    "data_parallel_in_python": "RuntimeError",
    "adam_on_the_host": "11",  # SIGSEGV
    "adam_over_all_tensors": "False",  # torch takes fake tensors one by one
}


@pytest.fixture(scope="module")
def without() -> dict[str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.helpers.plan_needs"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.private
@pytest.mark.parametrize("patch", NEEDED)
def test_the_patch_is_still_needed(patch, without):
    """Where this fails, the library has learnt it: the patch can go."""
    assert hasattr(patches, patch)
    assert without[patch] == NEEDED[patch]


@pytest.mark.private
def test_the_gpus_own_kernels_are_still_asked_for_by_name():
    from trl.kernels import chunked_logprob

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        assert callable(getattr(chunked_logprob, name))
    assert not chunked_logprob._use_triton(torch.device("cpu"))  # nor for a device that only stands for a GPU


def test_a_program_that_plans_keeps_its_libraries():
    before = torch.Tensor.data_ptr, torch.nn.Module._apply, torch.nn.functional.scaled_dot_product_attention
    assert simulation.simulate([]) == []
    assert (torch.Tensor.data_ptr, torch.nn.Module._apply, torch.nn.functional.scaled_dot_product_attention) == before
    loaded = (
        "import sys; import zero_recipes.plan.simulator.parent, zero_recipes.plan.command; print(sorted(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (
        "zero_recipes.plan.simulator.parent" in ended.stdout
        and "zero_recipes.plan.simulator.patches" not in ended.stdout
    )


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


def test_flops_are_those_of_the_matrix_products():
    observed = Observed()
    with FakeTensorMode(), observed:
        observed.counts_flops = True
        torch.empty(3, 4) @ torch.empty(4, 5) + 1
    assert observed.flops == 2 * 3 * 4 * 5


def test_numbers_are_answered_as_in_a_healthy_step():
    with FakeTensorMode(), Observed():
        assert torch.empty(1).item() == 0.0 and torch.empty(1, dtype=torch.uint8).item() == 0
        assert torch.empty(1, dtype=torch.int64).item() == 1 and not torch.empty(1, dtype=torch.bool)


def test_small_blocks_share_a_segment_and_large_ones_are_rounded():
    model = CachingAllocator()
    model.allocate(1, 1, 0)
    model.allocate(2, 1000, 0)
    assert model.reserved == device.kSmallBuffer
    model.allocate(3, 3 * MIB, 0)
    assert model.reserved == device.kSmallBuffer + device.kLargeBuffer
    model.allocate(4, 11 * MIB, 0)  # 17 MiB are left of the large buffer
    assert model.reserved == device.kSmallBuffer + device.kLargeBuffer
    model.allocate(5, 25 * MIB + 1, 0)
    assert model.reserved == device.kSmallBuffer + device.kLargeBuffer + 26 * MIB


def test_freed_blocks_join_and_serve_again_on_their_stream_only():
    model = CachingAllocator()
    for number in range(4):
        model.allocate(number, 5 * MIB, 0)
    assert model.reserved == 20 * MIB
    model.release(1)
    model.release(3)
    model.allocate(4, 8 * MIB, 0)  # 10 MiB are free, in two pieces
    assert model.reserved == 40 * MIB
    model.release(2)
    model.allocate(5, 15 * MIB, 0)
    assert model.reserved == 40 * MIB
    model.allocate(6, 2 * MIB, 7)
    assert model.reserved == 60 * MIB


def test_emptying_gives_whole_free_segments_back():
    model = CachingAllocator()
    model.allocate(1, 30 * MIB, 0)
    model.allocate(2, 3 * MIB, 0)
    model.release(1)
    model.empty()
    assert model.reserved == 20 * MIB and model.peak == 50 * MIB
    model.allocate(3, 30 * MIB, 0)
    assert model.reserved == 50 * MIB


def test_the_peak_counts_from_the_first_step_on():
    events = [("alloc", 1, 100 * MIB, 0), ("free", 1), ("empty",), ("phase", "forward"), ("alloc", 2, 30 * MIB, 0)]
    assert reserved_peak(events, "forward") == 30 * MIB
    assert reserved_peak(events, "no phase of this name") == 100 * MIB
