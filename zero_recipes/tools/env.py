"""`zero-recipes env`: the machine as a run finds it, to paste into an issue."""

import argparse
import math
import os
import re
from pathlib import Path
from typing import Any

import psutil
import yaml

from zero_recipes.core.host import Host, cpu_name, library_versions, version_of
from zero_recipes.core.units import size
from zero_recipes.engine.warnings import quieten

# variables that change a run
VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|HF|ACCELERATE|DS|TRITON|ZERO_RECIPES|NVIDIA)_.*"
    r"|LD_PRELOAD|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CXX|CFLAGS|CPATH"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)


def env(arguments: argparse.Namespace) -> int:
    quieten()
    print(yaml.safe_dump(machine(Host()), sort_keys=False, allow_unicode=True).rstrip())
    return 0


def machine(host: Host) -> dict[str, Any]:
    """None: no limit, or no such thing. `refusal`: torch's words if it was built for CUDA and cannot use a GPU."""
    import torch

    from zero_recipes.checks.machine import driver_version, refusal_of_cuda

    built_for = torch.version.cuda
    refusal = refusal_of_cuda() if built_for else ""
    gpus = []
    if not refusal:
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append({"name": gpu.name, "memory": size(gpu.total_memory)})
    free, limit = host.memory()
    lockable = host.lockable()
    return {
        "gpus": gpus,
        "cuda": {"driver": driver_version(host), "built_for": built_for, "refusal": refusal},
        "cpu": {"name": cpu_name(), "cores_of_machine": os.cpu_count(), "cores": host.cores()},
        "memory": {
            "machine": size(psutil.virtual_memory().total),
            "free": size(free),
            "limited_by": limit,
            "shared_memory_free": size(host.free_disk("/dev/shm")),
            "lockable": None if math.isinf(lockable) else size(lockable),
        },
        "disks": _disks(host),
        "build": {
            "cxx": host.compiler(),
            "python_headers": host.python_headers(),
            "libaio_headers": host.libaio_headers(),
            "cuda_toolkit": host.cuda_release(),
        },
        "infiniband": host.infiniband_devices(),
        "versions": library_versions() | {"zero-recipes": version_of("zero-recipes")},
        "variables": _variables(host),
    }


def _disks(host: Host) -> list[dict[str, str]]:
    import datasets
    from huggingface_hub import constants

    from zero_recipes.engine.kernels import build_root

    folders = {
        "this folder, output/": Path.cwd(),
        "models": constants.HF_HUB_CACHE,
        "prepared rows": datasets.config.HF_DATASETS_CACHE,
        "compiled kernels": build_root(host.environment),
        "ZeRO-Infinity": host.environment.get("ZERO_RECIPES_NVME_PATH"),
    }
    disks = []
    for purpose, folder in folders.items():
        if folder:
            disks.append({"for": purpose, "path": str(Path(folder)), "free": size(host.free_disk(folder))})
    return disks


def _variables(host: Host) -> dict[str, str]:
    shown = {}
    for name, value in sorted(host.environment.items()):
        if VARIABLES.fullmatch(name):
            shown[name] = "(set, not shown)" if SECRET.search(name) else value
    return shown
