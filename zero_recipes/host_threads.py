"""Threads for an optimizer that lies on the host: launchers leave each rank one, whatever the machine has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zero_recipes.host import Host
from zero_recipes.process import local_world_size
from zero_recipes.strategy import Strategy


def spread(strategy: Strategy, device: str, environment: Mapping[str, str], host: Host | None = None) -> int | None:
    """Give DeepSpeedCPUAdam this process's share of the cores; the number of threads, None where nothing was changed.

    Adam on the host is an OpenMP loop (DeepSpeed csrc/includes/cpu_adam.h), as are the sums and norms of offloaded
    gradients; torchrun and accelerate set OMP_NUM_THREADS=1 where the environment has none (torch 2.13
    distributed/run.py `config_from_args`, accelerate 1.15 utils/launch.py). Any other number was somebody's choice and
    stays, and so does the launcher's where the CPU itself trains, for then every rank computes on its cores already.
    """
    if device == "cpu" or not strategy.offload_optimizer or environment.get("OMP_NUM_THREADS", "1") != "1":
        return None
    threads = (host or Host()).threads(local_world_size(environment, strategy.world_size))
    torch.set_num_threads(threads)
    return threads


def described(threads: int | None) -> list[str]:
    """The line of a run's header; none where nothing was changed."""
    return [] if threads is None else [f"host threads  {threads} a process for the optimizer on the CPU"]
