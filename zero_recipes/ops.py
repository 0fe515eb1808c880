"""DeepSpeed's kernels ("ops"), compiled once for a machine and before its ranks meet: python -m zero_recipes.ops OP ...

DeepSpeed compiles an op where it is first loaded: on every rank at once, in silence, after the process group has
started. async_io takes two to five minutes on two cores.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from zero_recipes.checks.build_tools import is_compiled, is_prebuilt
from zero_recipes.host import Host
from zero_recipes.launch import remove_stale_build_locks

SAY_SECONDS = 30


def missing(ops: Iterable[str], device: str) -> list[str]:
    """Those that neither came with DeepSpeed's installation nor were compiled by an earlier launch."""
    return sorted(op for op in ops if not is_prebuilt(op, device) and not is_compiled(op, Host()))


def build(ops: Iterable[str]) -> None:
    """Compile these ops into torch's folder of extensions, one after another, and say how it goes."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    # DeepSpeed compiles with ninja, which stands beside the interpreter: a venv need not be activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for op in ops:
        start, done = time.monotonic(), threading.Event()
        print(f"compiling {op}, once for this machine (async_io takes minutes, others less than one)", flush=True)
        threading.Thread(target=_say_that_it_goes_on, args=(op, start, done), daemon=True).start()
        try:
            ALL_OPS[op].load(verbose=False)
        finally:
            done.set()
        print(f"compiled {op} in {time.monotonic() - start:.0f} s", flush=True)


def _say_that_it_goes_on(op: str, start: float, done: threading.Event) -> None:
    while not done.wait(SAY_SECONDS):
        print(f"still compiling {op}, {time.monotonic() - start:.0f} s", flush=True)


def main(names: list[str]) -> None:
    """Compile what is missing of `names` for runs on CPUs; async_io is left out where libaio is not installed."""
    if "async_io" in names and not Host().libaio_headers():
        print("async_io is not compiled: there is no libaio.h (apt-get install libaio-dev); NVMe offload needs it")
        names = [name for name in names if name != "async_io"]
    remove_stale_build_locks()
    build(missing(names, "cpu"))


if __name__ == "__main__":
    main(sys.argv[1:])
