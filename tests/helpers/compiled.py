"""A kernel as torch's extension builder leaves it, without a compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

DEEPSPEED, TORCH = (Path(importlib.util.find_spec(name).origin).parent for name in ("deepspeed", "torch"))


def write_compiled(folder: Path, **other: str) -> Path:
    """A kernel as torch leaves it in `folder`; `other` takes the place of this environment's paths and compiler."""
    here = {"deepspeed": str(DEEPSPEED), "torch": str(TORCH), "cxx": "c++"} | other
    source = folder.parent / f"{folder.name}.cpp"
    folder.mkdir(parents=True)
    source.write_text("")
    (folder / "build.ninja").write_text(
        f"cxx = {here['cxx']}\n"
        f"cflags = -I {here['deepspeed']}/ops/csrc/includes -isystem {here['torch']}/include "
        f"-isystem {sysconfig.get_path('include')} -fPIC\n"
        "rule compile\n  command = touch $out\n"
        f"build {folder.name}.so: compile {source}\n"
    )
    ninja = Path(sys.executable).with_name("ninja")
    subprocess.run([ninja, "-C", folder], check=True, capture_output=True)
    return source
