"""Rank 0 alone writes and checks a model; the others wait for it on the rendezvous store, not in a collective.

A collective ends every rank after `ddp_timeout`, and a large model on a slow disk takes longer
(deepspeedai/DeepSpeed#7533).
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist

POLL_SECONDS = 0.1
_calls = itertools.count()  # every process counts the same calls


def wait_for_writer() -> None:
    """Wait until rank 0 is here too, however long it takes. Every process calls this.

    Raises RuntimeError where the store is gone: it lives in rank 0, or in its launcher, which ends this process then.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, key = dist.group.WORLD.get_group_store(), f"zero_recipes/writer/{next(_calls)}"
    try:
        if dist.get_rank() == 0:
            store.set(key, "here")
        while not store.check([key]):
            time.sleep(POLL_SECONDS)
    except dist.DistError as error:
        raise RuntimeError("rank 0 died while it was saving") from error
