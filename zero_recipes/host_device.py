"""How fast offloaded states travel between host memory and a GPU: measured before training, as the run will copy."""

from __future__ import annotations

import time

import torch

from zero_recipes.strategy import Strategy

PROBE_BYTES = 256 * 2**20
COPIES = 4


def measured(strategy: Strategy, device: str) -> dict[str, float] | None:
    """{"to_device", "to_host"}: bytes per second of this process; None where nothing is offloaded, or no GPU trains."""
    offloads = strategy.offload_optimizer or strategy.offload_param
    return measure(device) if offloads and device == "cuda" else None


def measure(device: str, size: int = PROBE_BYTES) -> dict[str, float]:
    """Copies of page-locked memory, as pin_memory makes it. On "cpu" (a stand-in for tests) plain copies."""
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


def described(link: dict[str, float] | None) -> list[str]:
    """The line of a run's header; none where nothing was measured."""
    if link is None:
        return []
    return [
        f"host to GPU   {link['to_device'] / 1e9:.1f} GB/s, back {link['to_host'] / 1e9:.1f} GB/s "
        "(page-locked, this process alone)"
    ]
