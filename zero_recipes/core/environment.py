"""The hardware and the versions that a measurement was made on. Importing it does not import torch."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "peft", "evaluate")


def versions() -> dict[str, str]:
    """{package: installed version}, Python's included."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def hardware(device: str) -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, cores, memory, and the accelerator if one trains."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "gpus_visible": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def device_name(device: str) -> str:
    if device != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(torch.cuda.current_device())


def peak_memory(device: str) -> dict[str, int | None]:
    """{"allocated", "reserved", "rss"}: peaks in bytes of this process; the first two null without an accelerator."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    if device != "cuda":
        return {"allocated": None, "reserved": None, "rss": rss}
    import torch

    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "rss": rss}


def cpu_name() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
