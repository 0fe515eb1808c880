"""Checks of InfiniBand on a run over several machines: a container sees it in /sys, and NCCL may not open it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zero_recipes.core import units
from zero_recipes.core.errors import Finding
from zero_recipes.core.host_limits import Host
from zero_recipes.distributed.bandwidth import has_libibverbs, infiniband_devices

REGISTERED = 64 * 2**20  # bytes: more than the 8 MiB that systems allow by default, less than a run registers
FLAGS = "docker run --network host --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1"


def infiniband_findings(
    device: str, several_machines: bool, environment: Mapping[str, str], host: Host
) -> Iterator[Finding]:
    """Warnings where the machine has InfiniBand or RoCE that this run would not use, or would fail on."""
    off = environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET")
    devices = infiniband_devices(host) if device == "cuda" and several_machines and not off else {}
    closed = [name for name, opens in devices.items() if not opens]
    if closed and len(closed) == len(devices):
        yield Finding(
            "ZR656",
            f"this machine has InfiniBand or RoCE ({', '.join(closed)}), and this user or container cannot open it",
            "/sys/class/infiniband shows it everywhere, but /dev/infiniband/uverbs* is missing or closed: NCCL takes "
            "TCP, many times slower.",
            f"{FLAGS}; or NCCL_IB_DISABLE=1 where TCP is meant.",
            level="warning",
        )
    elif devices and not has_libibverbs():
        yield Finding(
            "ZR657",
            f"libibverbs.so.1 is not found, and this machine has InfiniBand or RoCE ({', '.join(devices)})",
            "NCCL loads it (src/misc/ibvsymbols.cc) and takes TCP without it, many times slower.",
            "apt-get install libibverbs1 ibverbs-providers (or your system's packages).",
            level="warning",
        )
    elif devices and host.lockable() < REGISTERED:
        yield Finding(
            "ZR658",
            f"InfiniBand or RoCE ({', '.join(devices)}), and each process may lock {units.size(int(host.lockable()))}",
            'NCCL registers its buffers with the device, which locks them: "ibv_reg_mr failed with error Cannot '
            'allocate memory" ends the run.',
            f"{FLAGS}; elsewhere ulimit -l unlimited.",
            level="warning",
        )
