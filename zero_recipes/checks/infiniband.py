"""Checks of InfiniBand on a run over several machines: a container sees it in /sys, and NCCL may not open it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zero_recipes.core import units
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host
from zero_recipes.distributed.links import has_libibverbs, infiniband_devices

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
        yield finding("ZR656", closed=", ".join(closed), flags=FLAGS)
    elif devices and not has_libibverbs():
        yield finding("ZR657", devices=", ".join(devices))
    elif devices and host.lockable() < REGISTERED:
        yield finding("ZR658", devices=", ".join(devices), size=units.size(int(host.lockable())), flags=FLAGS)
