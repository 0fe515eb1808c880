"""ZeRO-Infinity's disk: a folder is claimed for one run, and empty again after it.

DeepSpeed 0.19.8 swaps to `nvme_path`/zero_stage_3, whoever else does (runtime/swap_tensor/).
Two runs on one path would silently overwrite each other's states. Swap files stay after a run.
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
    """Return the folders to which a run swaps. Empty where nothing is swapped."""
    return sorted({Path(strategy.ds.offload_block(key)["nvme_path"]) for key in strategy.ds.on_nvme})


@contextmanager
def swap_space(strategy: Strategy) -> Iterator[None]:
    """Claim the run's swap folders. Collective where there are any.

    The first process of each machine holds the locks.
    Raises Refusal on all ranks where another run holds a folder.
    """
    folders = swap_folders(strategy)
    with ExitStack() as claims:

        def claim() -> None:
            for folder in folders:
                claims.enter_context(claimed(folder))

        if folders:
            once_per_node(claim, "claims its folder on NVMe")
        yield


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a swap folder alone. Under its lock, a killed run's swap files are deleted first, this run's own last.

    Another run's files have the same names.
    """
    swapped = folder / SWAPPED
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)  # ends with the process
    try:
        lock.acquire()
    except Timeout:
        raise refusal("ZR622", folder=folder, lock=folder / LOCK, swapped=SWAPPED, scope="machine") from None
    try:
        if swapped.exists():
            print(f"deleted: {swapped}, swap files of a killed run", flush=True)
            shutil.rmtree(swapped)
        yield
    finally:
        shutil.rmtree(swapped, ignore_errors=True)
        lock.release()


def swapped_bytes(strategy: Strategy) -> int:
    """Add up the bytes of this rank's swap files."""
    size = 0
    for folder in swap_folders(strategy):
        for path in folder.glob(f"{SWAPPED}/*/rank{rank()}/*"):
            size += path.stat().st_size
    return size
