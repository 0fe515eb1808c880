"""The locks of torch's extension folders, where DeepSpeed's kernels are compiled: stale ones go, live ones are awaited.

torch (utils/file_baton.py) waits while `lock` exists in an extension's folder, silently and for ever, also where the
process that made it was killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil
import torch

from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.process import rank

COMPILE_SECONDS = 1800  # more for the ranks to come together, for each op that the first of a machine compiles
SAY_SECONDS = 30
POLL_SECONDS = 0.1
COMPILERS = {"ninja", "c++", "g++", "cc1plus", "clang++", "as", "collect2", "ld", "nvcc", "cicc", "ptxas"}


def build_root(environment: Mapping[str, str]) -> Path:
    """The folder that torch builds extensions in, and DeepSpeed its kernels."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(environment.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def extension_folder(environment: Mapping[str, str], name: str) -> Path:
    """The folder of one extension: torch/utils/cpp_extension.py, `_get_build_directory`."""
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"], name)
    from torch.utils.cpp_extension import get_default_build_root

    release = torch.version.hip or torch.version.cuda
    device = f"{'rocm' if torch.version.hip else 'cu'}{release.replace('.', '')}" if release else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(get_default_build_root(), f"{python}_{device}", name)


def names_of(op: str) -> tuple[str, ...]:
    """The extensions that an op loads (deepspeed 0.19.8, op_builder/async_io.py `load` loads pin_memory first)."""
    return ("pin_memory", op) if op == "async_io" else (op,)


def stale_build_locks(root: Path) -> list[Path]:
    """Locks that a killed compiler left: older than this process (its sisters start with it), and held by nobody."""
    started = psutil.Process().create_time()
    locks = [lock for lock in root.rglob("lock") if lock.stat().st_mtime < started - 1]
    return [lock for lock in locks if not any(_holders(lock))]


def _holders(lock: Path) -> Iterator[psutil.Process]:
    """Processes of this machine that compile there: who made the lock has it open (torch/utils/file_baton.py), and
    ninja and the compilers that it starts work in the folder, or name it."""
    lock = lock.resolve()
    for process in psutil.process_iter(["name"]):
        try:
            if any(Path(file.path) == lock for file in process.open_files()):
                yield process
            elif process.info["name"] in COMPILERS:
                words = [process.cwd(), *process.cmdline()]
                if any(lock.parent in (Path(word), *Path(word).parents) for word in words):
                    yield process
        except psutil.Error:  # it has ended, or it is another user's
            continue


def remove_stale_build_locks() -> None:
    """Delete them, in one process of the machine, and say so."""
    if int(os.environ.get("LOCAL_RANK", rank())):
        return
    for lock in stale_build_locks(build_root(os.environ)):
        print(f"removed a build lock that a killed compiler left: {lock}", flush=True)
        lock.unlink(missing_ok=True)


def wait_for_builds(ops: Iterable[str], seconds: float = COMPILE_SECONDS) -> None:
    """Wait while other processes compile what this run loads, and say so. Raises Refusal after so many seconds."""
    folders = [extension_folder(os.environ, name) for op in sorted(ops) for name in names_of(op)]
    started, said = time.monotonic(), 0.0
    while locked := [folder for folder in folders if (folder / "lock").exists()]:
        waited = time.monotonic() - started
        if waited > seconds:
            raise still_locked(locked[0], seconds)
        if not said or waited > said + SAY_SECONDS:
            said = waited or POLL_SECONDS
            print(f"waiting for another process that compiles {locked[0].name}: {_named(locked[0])}", flush=True)
        time.sleep(POLL_SECONDS)
        remove_stale_build_locks()


def still_locked(folder: Path, seconds: float) -> Refusal:
    """What a run says that has waited for a lock in vain."""
    lock = folder / "lock"
    return refusal("ZR626", name=folder.name, seconds=seconds, lock=lock, named=_named(folder), scope="machine")


def _named(folder: Path) -> str:
    holders = ", ".join(f"process {holder.pid} ({holder.name()})" for holder in _holders(folder / "lock"))
    return holders or "nobody that can be seen from here"
