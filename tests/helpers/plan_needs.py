"""Prints, as JSON, what the libraries do with fake tensors when zero_recipes/plan/simulator/patches.py is not there.

A process of its own for test_plan_patches.py: it starts a pretended process group.
"""

from __future__ import annotations

import importlib
import json
import os

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore


def outcome(attempt) -> str:
    """The error's class, or what came out."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            return repr(attempt())
        except Exception as error:
            return type(error).__name__


def addresses():
    return len({torch.empty(4).data_ptr(), torch.empty(4).data_ptr()})


def other_ranks():
    from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks

    return assert_ints_same_as_other_ranks([1, 2, 3])


def host_adam():
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.empty(8))
    weight.grad = torch.empty(8)
    optimizer = DeepSpeedCPUAdam([weight])
    child = os.fork()  # the kernel reads from address 0
    if child == 0:
        optimizer.step()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def seen_as_a_compiler():
    from transformers.utils.import_utils import is_tracing

    return is_tracing(torch.empty(2))


def main() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    import deepspeed

    compiled = []
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: compiled.append("half a minute")
    deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)
    found = {
        "no_kernels": str(len(compiled)),
        "answer_for_number": outcome(lambda: torch.empty(1).item()),
        "no_addresses": outcome(addresses),
        "no_pinned_memory": outcome(lambda: torch.empty(2).pin_memory()),
        "conversions_by_hand": outcome(lambda: torch.nn.Linear(2, 2).to(torch.bfloat16)),
        "no_other_ranks": outcome(other_ranks),
        "masks_by_shape": outcome(seen_as_a_compiler),
        "data_parallel_in_python": outcome(lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))),
        "adam_on_the_host": outcome(host_adam),
        "adam_over_all_tensors": outcome(lambda: type(torch.empty(1)) in optimizer._foreach_supported_types),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


main()
