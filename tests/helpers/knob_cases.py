"""A run whose own memory can be told from that of the runs before it in the same process."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from tests.helpers.cases import train


def train_and_watch(argv: list[str]) -> dict:
    """metrics.json of a run, and by how many bytes resident memory grew at most while it was at work (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = _status("VmRSS")
    metrics = train(argv)["metrics"]
    return {"metrics": metrics, "grown_bytes": _status("VmHWM") - before}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
