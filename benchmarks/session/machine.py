"""The first row of each part: what this machine is. Whatever cannot be read is a text that says why."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

import psutil

PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "deepspeed", "datasets", "peft", "pyarrow", "numpy")
QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
# torch is asked in a process of its own: a context here would lie on the card beside every run
ASKED = (
    "import json, torch; c = torch.cuda.is_available(); "
    "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, 'available': c} | ("
    "{'name': torch.cuda.get_device_name(), 'total_bytes': torch.cuda.get_device_properties(0).total_memory, "
    "'capability': torch.cuda.get_device_capability()} if c else {})))"
)


def describe(work: Any) -> dict[str, Any]:
    """{what: value or text of the failure}."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": {name: _version(name) for name in PACKAGES},
        "nvidia_smi": _output(QUERY),
        "nvcc": _output(["nvcc", "--version"]).splitlines()[-2:],
        "torch": _output([sys.executable, "-c", ASKED]),
        "cores": psutil.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": shutil.disk_usage(work).free,
        "memlock": _output(["sh", "-c", "ulimit -l"]),
        "compilers": [name for name in ("cc", "c++", "nvcc", "ninja") if shutil.which(name)],
    }


def card_bytes(described: dict[str, Any]) -> int:
    """Memory of the card; 0 where there is none."""
    try:
        return json.loads(described["torch"]).get("total_bytes", 0)
    except ValueError:
        return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error!r}"
    return (done.stdout or done.stderr).strip()[-2000:]
