"""How fast the network between the machines of a run is, measured before training; InfiniBand that NCCL can open."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from typing import Any

import torch
from torch import distributed

from zero_recipes.core import units
from zero_recipes.core.host import Host

# of NCCL smaller ones are limited by latency (nccl-tests reaches the bus's rate from about 128 MiB on); gloo on CPUs
# is at its rate with less, and slow
ALL_REDUCE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
REPETITIONS = 3


def measure_network(device: str) -> dict[str, Any] | None:
    """None on one machine; else the links between the machines, as docs/metrics.md has them. A collective.

    The bandwidth is nccl-tests' bus bandwidth (doc/PERFORMANCE.md there): 2 (N - 1) / N times the bytes, by the time.
    """
    if not distributed.is_initialized():
        return None
    ranks = distributed.get_world_size()
    local_ranks: list = [None] * ranks
    distributed.all_gather_object(local_ranks, int(os.environ.get("LOCAL_RANK", 0)))
    machines = local_ranks.count(0)
    if machines < 2:
        return None
    size, seconds = ALL_REDUCE_BYTES[device], _all_reduce_seconds(device)
    return {
        "machines": machines,
        "backend": distributed.get_backend(),
        "all_reduce_bytes": size,
        "all_reduce_seconds": seconds,
        "bus_bytes_per_second": 2 * (ranks - 1) / ranks * size / seconds,
    }


def _all_reduce_seconds(device: str) -> float:
    """The median of a few, after one that sets the connections up."""
    tensor = torch.zeros(ALL_REDUCE_BYTES[device] // 4, device=device)
    taken = []
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def network_header(network: dict[str, Any] | None) -> list[str]:
    """What a run on several machines prints at its start; nothing on one."""
    if network is None:
        return []
    rate = units.rate(network["bus_bytes_per_second"])
    return [f"network       {network['machines']} machines, {network['backend']}: all-reduce {rate} on the bus"]


def infiniband_devices(host: Host) -> dict[str, bool]:
    """{device of the kernel: whether its file can be opened here}.

    /sys shows a machine's devices in all of its containers. libibverbs opens /dev/infiniband/uverbsN, which a container
    has where it was given it; /sys/class/infiniband_verbs says whose file that is.
    """
    found = {path.name: False for path in sorted(host.at("/sys/class/infiniband").glob("*"))}
    for ibdev in host.at("/sys/class/infiniband_verbs").glob("uverbs*/ibdev"):
        if os.access(host.at(f"/dev/infiniband/{ibdev.parent.name}"), os.R_OK | os.W_OK):
            found[ibdev.read_text().strip()] = True
    return found


def has_libibverbs() -> bool:
    """Whether the library is found that NCCL loads for InfiniBand (src/misc/ibvsymbols.cc); else it takes TCP."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True
