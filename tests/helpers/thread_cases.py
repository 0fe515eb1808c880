"""A case of tests/helpers/group.py for the threads of the optimizer on the CPU."""

from __future__ import annotations

import os

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.host import Host
from zero_recipes.distributed.group import set_host_threads

ON_HOST = DsConfig({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
OFFLOADED = Strategy("zero2_offload", 4, ON_HOST, "ds_configs/zero2_offload.json")


class SixteenCores(Host):
    def cores(self) -> int:
        return 16


def adam_with_four_threads() -> dict:
    """DeepSpeed's Adam on the CPU before and after set_host_threads: threads started, and whether the weights agree."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def step():
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1_000_003))
        weight.grad = torch.randn(1_000_003)
        DeepSpeedCPUAdam([weight]).step()
        return weight.detach()

    alone, before = step(), len(os.listdir("/proc/self/task"))
    threads = torch.get_num_threads()
    try:
        set = set_host_threads(OFFLOADED, "cuda", os.environ | {"LOCAL_WORLD_SIZE": "4"}, SixteenCores())
        shared = step()
        return {"set": set, "started": len(os.listdir("/proc/self/task")) - before, "same": torch.equal(alone, shared)}
    finally:
        torch.set_num_threads(threads)
