"""ZeRO-Infinity's disk: a folder is claimed for one run, and empty again after it.

DeepSpeed 0.19.8 swaps to `nvme_path`/zero_stage_3, whoever else does (runtime/swap_tensor/): two runs on one path would
overwrite each other's states silently, and what a run has swapped stays there when it ends.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import refusal
from zero_recipes.core.process import rank
from zero_recipes.engine.group import once_per_node

LOCK = "zero-recipes.lock"
SWAPPED = "zero_stage_3"  # DeepSpeed's folder below nvme_path


def swap_folders(strategy: Strategy) -> list[Path]:
    """The distinct nvme_path folders of a run; none where nothing is swapped."""
    return sorted({Path(strategy.ds.offload_block(key)["nvme_path"]) for key in strategy.ds.on_nvme})


@contextmanager
def swap_space(strategy: Strategy) -> Iterator[None]:
    """Claim the run's swap folders. Every rank enters (collective where there are any); the first process of each
    machine holds the locks. Raises Refusal on all of them where another run holds a folder."""
    folders = swap_folders(strategy)
    with ExitStack() as claims:
        if folders:
            once_per_node(lambda: [claims.enter_context(claimed(folder)) for folder in folders])
        yield


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock `folder`. The swap files that a killed run has left there are deleted before, this run's own after; by the
    process that holds the lock: another run's files have the same names, and may be there once it is free."""
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)  # ends with the process, however that ends
    try:
        lock.acquire()
    except Timeout:
        raise refusal("ZR622", folder=folder, lock=folder / LOCK, swapped=SWAPPED, scope="machine") from None
    try:
        if (folder / SWAPPED).exists():
            print(f"deleted: {folder / SWAPPED}, swap files of a killed run", flush=True)
            shutil.rmtree(folder / SWAPPED)
        yield
    finally:
        shutil.rmtree(folder / SWAPPED, ignore_errors=True)
        lock.release()


def swapped_bytes(strategy: Strategy) -> int:
    """Bytes of this rank's swap files."""
    own = (path for folder in swap_folders(strategy) for path in (folder / SWAPPED).glob(f"*/rank{rank()}/*"))
    return sum(path.stat().st_size for path in own)
