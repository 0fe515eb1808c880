"""What a measurement was made on: versions, hardware, peaks of memory. Importing it does not import torch."""

import os
import platform
import re
import resource
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from zero_recipes.core.allocator import allocator_settings

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "peft", "evaluate")


def library_versions() -> dict[str, str]:
    """The installed versions of Python and of the libraries that decide what a run does, by their names."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str:
    """The installed version of a package, or "not installed": zero-recipes has no metadata in a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def are_installed(versions: Mapping[str, str]) -> bool:
    """Whether these versions of packages are the installed ones. What others wrote is of no use to them."""
    return all(version_of(package) == version for package, version in versions.items())


def hardware_facts(device: str) -> dict[str, Any]:
    """Describe the machine and, with the device "cuda", its GPUs, for metrics.json."""
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
            "allocator": allocator_settings(os.environ),
        }
    return found


def peak_memory(device: str) -> dict[str, int | None]:
    """Read this process's peaks of memory in bytes.

    Returns {"allocated", "reserved", "rss"}; the first two are None without an accelerator.
    """
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    peaks = {"allocated": None, "reserved": None, "rss": rss}
    if device == "cuda":
        import torch

        peaks["allocated"] = torch.cuda.max_memory_allocated()
        peaks["reserved"] = torch.cuda.max_memory_reserved()
    return peaks


def cpu_name() -> str:
    """The name of the processor, as /proc/cpuinfo has it."""
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
