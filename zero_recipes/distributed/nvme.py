"""ZeRO-Infinity's disk: a folder claimed for one run, and empty again after it.

DeepSpeed 0.19.8 swaps to `nvme_path`/zero_stage_3, whoever else does: two runs on one path would overwrite each other's
states silently, and what a run has swapped stays there when it ends (runtime/swap_tensor/).
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import refusal
from zero_recipes.core.process import rank
from zero_recipes.distributed.group import once_per_node

LOCK = "zero-recipes.lock"
SWAPPED = "zero_stage_3"  # DeepSpeed's folder below nvme_path


def paths(strategy: Strategy) -> list[Path]:
    """The distinct nvme_path folders of a run; none where nothing is swapped."""
    return [] if strategy.ds_config is None else sorted(map(Path, strategy.ds_config.nvme_paths))


@contextmanager
def swap_space(strategy: Strategy) -> Iterator[None]:
    """The run's folders are its own inside, and its swap files are gone afterwards. Every rank enters (the first
    process of each machine works, the others wait). Raises Refusal on all of them where another run holds a folder."""
    folders = paths(strategy)
    if not folders:
        yield
        return
    locks: list[FileLock] = []
    try:
        once_per_node(lambda: [claim_swap_folder(folder, locks) for folder in folders])
        yield
    finally:
        # by the process that holds the lock: another run's files have the same names, and may be there once it is free
        for lock, folder in zip(locks, folders, strict=False):
            shutil.rmtree(folder / SWAPPED, ignore_errors=True)
            lock.release()


def claim_swap_folder(folder: Path, locks: list[FileLock]) -> None:
    """Hold `folder` for this run (its lock is appended to `locks`) and delete what a killed run has left there."""
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)  # ends with the process, however that ends
    try:
        lock.acquire()
    except Timeout:
        raise refusal("ZR622", folder=folder, lock=folder / LOCK, swapped=SWAPPED, scope="machine") from None
    locks.append(lock)
    if (folder / SWAPPED).exists():
        print(f"deleted: {folder / SWAPPED}, swap files that a killed run left", flush=True)
        shutil.rmtree(folder / SWAPPED)


def swapped_bytes(strategy: Strategy) -> int:
    """Bytes of this rank's swap files."""
    own = (path for folder in paths(strategy) for path in (folder / SWAPPED).glob(f"*/rank{rank()}/*"))
    return sum(path.stat().st_size for path in own)
