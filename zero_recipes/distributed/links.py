"""How fast the links of a run are, measured before training: host memory to GPU, and between machines."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed

from zero_recipes.config.strategy import Strategy
from zero_recipes.core import units
from zero_recipes.core.host import Host
from zero_recipes.distributed.group import interface

# of NCCL smaller ones are limited by latency (nccl-tests reaches the bus's rate from about 128 MiB on); gloo on CPUs
# is at its rate with less, and slow
ALL_REDUCE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
REPETITIONS = 3
PROBE_BYTES = 256 * 2**20
COPIES = 4
Rates = dict[str, float]


def measure_host_link(strategy: Strategy, device: str) -> dict[str, Rates | None] | None:
    """{"alone", "together"}: the slowest copies of each process of a machine after the other, and of all at once;
    "together" is None where a machine has one. None where nothing is offloaded, or no GPU trains. A collective."""
    offloads = strategy.offload_optimizer or strategy.offload_param
    if not offloads or device != "cuda":
        return None
    if distributed.is_initialized():
        found = link_of_all(int(os.environ.get("LOCAL_RANK", 0)), lambda: copy_rates(device))
    else:
        found = {"alone": copy_rates(device), "together": None}
    torch.cuda.empty_cache()  # the probe's memory is free for what comes
    return found


def link_of_all(local_rank: int, measure: Callable[[], Rates]) -> dict[str, Rates | None]:
    """`measure` on one process of each machine at a time, then on all at once. A collective."""
    most, alone = max(_gathered(local_rank)), {}
    for turn in range(1 + most):
        if turn == local_rank:
            alone = measure()
        distributed.barrier()
    return {"alone": _slowest(alone), "together": _slowest(measure()) if most else None}


def _slowest(own: Rates) -> Rates:
    """The lowest rate of each direction over all ranks. A collective."""
    found = _gathered(own)
    return {name: min(rates[name] for rates in found) for name in own}


def _gathered(own: Any) -> list[Any]:
    found: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def copy_rates(device: str, size: int = PROBE_BYTES) -> Rates:
    """Bytes per second of copies of page-locked memory, as pin_memory makes it. On "cpu" (for tests) plain copies."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = {}
    for name, target, source in (("to_device", there, host), ("to_host", host, there)):
        target.copy_(source)  # the first one also makes the context and touches every page
        wait()
        start = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        wait()
        found[name] = COPIES * size / (time.perf_counter() - start)
    return found


def host_link_header(link: Mapping[str, Rates | None] | None) -> list[str]:
    """The lines of a run's header; none where nothing was measured."""
    named = {"alone": "each GPU alone", "together": "all GPUs at once"}
    return [
        f"host to GPU   {units.rate(rates['to_device'])}, back {units.rate(rates['to_host'])} "
        f"(page-locked, {named[how]}, the slowest)"
        for how, rates in (link or {}).items()
        if rates is not None
    ]


def measure_network(device: str) -> dict[str, Any] | None:
    """None on one machine; else the links between the machines, as docs/metrics.md has them. A collective.

    The bandwidth is nccl-tests' bus bandwidth (doc/PERFORMANCE.md there): 2 (N - 1) / N times the bytes, by the time.
    """
    if not distributed.is_initialized():
        return None
    backend = distributed.get_backend()
    first_of_its_machine = int(os.environ.get("LOCAL_RANK", 0)) == 0
    found = _gathered(interface(backend) if first_of_its_machine else None)
    interfaces = [name for name in found if name is not None]
    if len(interfaces) < 2:
        return None
    size, ranks = ALL_REDUCE_BYTES[device], len(found)
    seconds = _all_reduce_seconds(device, size)
    return {
        "machines": len(interfaces),
        "backend": backend,
        "transport": transport(backend, os.environ, Host()),
        "interfaces": interfaces,
        "all_reduce_bytes": size,
        "all_reduce_seconds": seconds,
        "bus_bytes_per_second": 2 * (ranks - 1) / ranks * size / seconds,
    }


def _all_reduce_seconds(device: str, size: int) -> float:
    """The median of a few of `size` bytes, after one that sets the connections up."""
    tensor = torch.zeros(size // 4, device=device)
    taken = []
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def transport(backend: str, environment: Mapping[str, str], host: Host) -> str:
    """What carries the bytes: of gloo TCP, of NCCL what it takes by its own rules (NCCL_DEBUG=INFO shows the proof).

    NCCL takes InfiniBand or RoCE where it can open such a device, unless NCCL_IB_DISABLE or NCCL_NET say otherwise.
    """
    if backend != "nccl":
        return "TCP"
    if environment.get("NCCL_NET"):
        return f"{environment['NCCL_NET']} (NCCL_NET)"
    names = [name for name, opens in infiniband_devices(host).items() if opens]
    if names and environment.get("NCCL_IB_DISABLE", "0") != "1" and has_libibverbs():
        return f"InfiniBand or RoCE ({', '.join(names)})"
    return "TCP"


def infiniband_devices(host: Host) -> dict[str, bool]:
    """{device of the kernel: whether its file can be opened here}.

    /sys shows a machine's devices in all of its containers. libibverbs opens /dev/infiniband/uverbsN, which a container
    has where it was given it; /sys/class/infiniband_verbs says whose file that is.
    """
    shown = host.at("/sys/class/infiniband")
    found = {path.name: False for path in sorted(shown.iterdir())} if shown.is_dir() else {}
    for verbs in host.at("/sys/class/infiniband_verbs").glob("uverbs*"):
        name = (verbs / "ibdev").read_text().strip() if (verbs / "ibdev").is_file() else ""
        if name in found and os.access(host.at(f"/dev/infiniband/{verbs.name}"), os.R_OK | os.W_OK):
            found[name] = True
    return found


def has_libibverbs() -> bool:
    """Whether the library is found that NCCL loads for InfiniBand (src/misc/ibvsymbols.cc); else it takes TCP."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def network_header(links: Mapping[str, Any] | None) -> list[str]:
    """What a run on several machines prints at its start; nothing on one."""
    if links is None:
        return []
    return [
        f"network       {links['machines']} machines, {links['backend']} over {links['transport']}: "
        + "; ".join(links["interfaces"]),
        f"all-reduce    {units.size(links['all_reduce_bytes'])} in {links['all_reduce_seconds']:.4f} s, "
        f"{units.rate(links['bus_bytes_per_second'])} on the bus",
    ]
