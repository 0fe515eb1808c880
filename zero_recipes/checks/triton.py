"""What Triton needs on this machine: TRL's fused LM head compiles its kernels in the first step of every GPU run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host

WHY = (
    "TRL 1.16 (kernels/chunked_logprob.py) runs its fused LM head in Triton, which {} in the first step, the model "
    "loaded."
)


def triton_findings(device: str, host: Host) -> Iterator[Finding]:
    """Nothing where TRL does not take Triton: on the CPU, or without the package."""
    from transformers.utils import is_triton_available

    if device != "cuda" or not is_triton_available():
        return
    compiler = host.environment.get("CC")
    if not any(host.which(name) for name in ([compiler.split()[0]] if compiler else ["gcc", "clang"])):
        yield finding(
            "ZR652",
            compiler=compiler or "gcc or clang",
            why=WHY.format("compiles a C extension for the driver (triton/runtime/build.py)"),
        )
    if not host.python_headers():
        yield finding("ZR653", why=WHY.format("compiles a C extension for Python (triton/runtime/build.py)"))
    folder = cache_folder(host)
    existing = next(path for path in (folder, *folder.parents) if host.at(path).exists())
    if not os.access(host.at(existing), os.W_OK | os.X_OK):
        yield finding(
            "ZR654", folder=folder, getuid=os.getuid(), why=WHY.format("keeps what it compiles there (triton/knobs.py)")
        )


def cache_folder(host: Host) -> Path:
    """triton/knobs.py, `cache_knobs`: the folder of compiled kernels."""
    home = host.environment.get("TRITON_HOME") or host.environment.get("HOME") or "~"
    return Path(host.environment.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).expanduser().absolute()
