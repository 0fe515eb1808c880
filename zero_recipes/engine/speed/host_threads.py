"""An offloaded optimizer steps on one core: torchrun and accelerate set OMP_NUM_THREADS=1 where there is none.

DeepSpeedCPUAdam is an OpenMP loop.

Library: torch 2.13, distributed/run.py; DeepSpeed 0.19.8, csrc/includes/cpu_adam.h.
Upstream: none found.
Here: each process gets its share of the cores, unless a user has chosen another number than 1.
"""

import os

import torch

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.host import Host
from zero_recipes.core.process import local_world_size


def set_host_threads(strategy: Strategy, device: str) -> None:
    """Give an offloaded optimizer this process's share of the cores.

    Not where the CPU trains: every rank computes on its cores already.
    """
    if device == "cuda" and strategy.ds.offload_optimizer and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(Host().threads(local_world_size(os.environ, strategy.world_size)))
