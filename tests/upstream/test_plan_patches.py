"""The simulation's own parts: each patch is still needed, tracker and allocator by hand."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.tiny import ROOT
from zero_recipes.tools.plan.simulator.tracker import LiveStorages, Observed

aten = torch.ops.aten


def host_adam() -> int:
    """The signal that ends a process in which the kernel reads from address 0."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.empty(8))
    weight.grad = torch.empty(8)
    optimizer = DeepSpeedCPUAdam([weight])
    if (child := os.fork()) == 0:
        optimizer.step()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def padding_free() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([{"input_ids": [1] * 8, "labels": [1] * 8}])


def named(module: str, name: str):
    return getattr(importlib.import_module(module), name)


# patch: (what a library does with fake tensors without it, the error's class or what comes out)
NEEDED = {
    "answer_for_number": (lambda: torch.empty(1).item(), "DataDependentOutputException"),
    "no_addresses": (lambda: len({torch.empty(4).data_ptr(), torch.empty(4).data_ptr()}), "1"),
    "no_pinned_memory": (lambda: torch.empty(2).pin_memory(), "AssertionError"),
    "conversions_by_hand": (lambda: torch.nn.Linear(2, 2).to(torch.bfloat16), "RuntimeError"),
    "no_other_ranks": (
        lambda: named("deepspeed.runtime.zero.utils", "assert_ints_same_as_other_ranks")([1, 2]),
        "DataDependentOutputException",
    ),
    "masks_by_shape": (lambda: named("transformers.masking_utils", "is_tracing")(torch.empty(2)), "True"),
    "collate_with_numbers": (padding_free, "DynamicOutputShapeException"),
    "data_parallel_in_python": (
        lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)),
        "RuntimeError",
    ),
    "adam_on_the_host": (host_adam, "11"),
    "adam_over_all_tensors": (
        lambda: type(torch.empty(1)) in named("torch.optim.optimizer", "_foreach_supported_types"),
        "False",
    ),
}
WITHOUT = """
import importlib, json, os
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
import torch, deepspeed
from tests.upstream.test_plan_patches import NEEDED, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
found = {"no_kernels": "unused"}
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: found.update(no_kernels="used")
deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)
for patch, (attempt, _) in NEEDED.items():
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            found[patch] = repr(attempt())
        except Exception as error:
            found[patch] = type(error).__name__
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def without() -> dict[str, str]:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.private
@pytest.mark.parametrize("patch", ["no_kernels", *NEEDED])
def test_the_patch_is_still_needed(patch, without):
    """Where this fails, the library has learnt it: the patch can go."""
    assert without[patch] == (NEEDED[patch][1] if patch in NEEDED else "used")


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
    assert tracker.peaks["forward"] == 1024
    assert tracker.peaks["backward"] == 2560 == sum(tracker.at_peak["backward"].values())
    assert tracker.at_peak["backward"]["grads"] == 512 and tracker.at_peak["backward"]["activations"] == 2048


def test_numbers_are_answered_as_in_a_healthy_step():
    with FakeTensorMode(), Observed():
        assert torch.empty(1).item() == 0.0 and torch.empty(1, dtype=torch.uint8).item() == 0
        assert torch.empty(1, dtype=torch.int64).item() == 1 and not torch.empty(1, dtype=torch.bool)


AUTOCAST = """
import json, os
os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
from zero_recipes.tools.plan.simulator.device import set_up_fake_gpu
set_up_fake_gpu()
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from zero_recipes.tools.plan.simulator import stand_ins
from zero_recipes.tools.plan.simulator.tracker import LiveStorages, Observed
stand_ins.attention_as_on_cuda()
stand_ins.set_up_autocast(torch.bfloat16)
tracker, found = LiveStorages("gpu"), {}
with FakeTensorMode(allow_non_fake_inputs=True), Observed(tracker):
    q = 1 * torch.empty(2, 8, 64, 16, device="gpu", requires_grad=True)
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device="gpu")
    for name, masked in (("with a mask", mask), ("without", None)):
        before = tracker.live
        with torch.autocast("gpu", torch.bfloat16):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, masked)
        found[name] = [str(out.dtype), tracker.live - before]
        del out
    layer = torch.nn.Linear(64, 64, bias=False, device="gpu")
    x = torch.empty(1, 64, device="gpu", requires_grad=True)
    with torch.autocast("gpu", torch.bfloat16):
        loss = checkpoint(layer, x, use_reentrant=False).sum()
    before = tracker.live
    loss.backward()
    found["after backward"] = tracker.live - before
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.mark.private
def test_autocast_keeps_what_a_gpu_keeps():
    """Attention multiplies in 16 bits and keeps its arguments so, a mask once for all heads. Copies of weights that a
    recomputation makes go with it."""
    ended = subprocess.run([sys.executable, "-c", AUTOCAST], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    one = 2 * 8 * 64 * 16 * 2  # bytes of queries
    sums, seeds = 4 * 2 * 8 * 64, 1024  # logsumexp; at most, of random numbers
    (dtype, kept), (plain, less) = found["with a mask"], found["without"]
    assert dtype == plain == "torch.bfloat16"
    assert 4 * one + sums <= less <= 4 * one + sums + seeds, less  # three arguments and what comes out
    assert kept <= less + 2 * 2 * 64 * 64 + seeds, (kept, less)
    assert found["after backward"] == 4 * (64 * 64 + 64), found  # gradients in fp32
