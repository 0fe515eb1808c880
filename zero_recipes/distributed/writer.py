"""Rank 0 alone writes and checks a model; the others wait for it on the rendezvous store, not in a collective.

A collective ends every rank after `ddp_timeout`, and a large model on a slow disk takes longer
(deepspeedai/DeepSpeed#7533).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import torch.distributed as dist

POLL_SECONDS = 0.1
_calls = itertools.count()  # every process counts the same calls


@contextlib.contextmanager
def rank_0_writes() -> Iterator[None]:
    """Every process goes through this; at its end all wait until rank 0 has come there too, however long that takes.

    Raises RuntimeError on the others where rank 0 failed, or where the store is gone: it lives in rank 0 or in its
    launcher, which ends the others then.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, key = dist.group.WORLD.get_group_store(), f"zero_recipes/writer/{next(_calls)}"
    first = dist.get_rank() == 0
    try:
        yield
    except BaseException as error:
        if first:
            store.set(key, f"{type(error).__name__}: {error}")
        raise
    if first:
        store.set(key, "")
        return
    try:
        while not store.check([key]):
            time.sleep(POLL_SECONDS)
        failure = store.get(key).decode()
    except dist.DistError as error:
        raise RuntimeError("rank 0 died while it was saving") from error
    if failure:
        raise RuntimeError(f"rank 0 failed while it was saving: {failure}")
