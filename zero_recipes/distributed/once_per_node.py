"""One process of each node works, the others wait for its result: on the rendezvous store, not in a collective.

A collective ends every rank after `ddp_timeout` where tokenising takes longer. A broadcast on a gloo group of its own
does not, but finds out late that its source was killed: forked tokenisers (`dataset_num_proc`) keep the connections of
a dead process open.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.process import lives, rank

POLL_SECONDS = 0.1
GATHER_SECONDS = 10.0
_calls = itertools.count()  # every process counts the same calls


def once_per_node(work: Callable[[], Any]) -> Any:
    """What `work` returns (as JSON), called on the first process of each node only. Every process calls this.

    Raises Refusal on every process where `work` is refused; RuntimeError on the others where it fails or its process
    dies, with that process's rank.
    """
    return _on_one(work, rank() - int(os.environ.get("LOCAL_RANK", 0)), "prepares the data of this machine")


def once(work: Callable[[], Any], doing: str) -> Any:
    """The same on rank 0 alone, for all nodes. `doing`, in an error: "plans the run"."""
    return _on_one(work, 0, doing)


def _on_one(work: Callable[[], Any], first: int, doing: str) -> Any:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    store = dist.group.WORLD.get_group_store()
    call = f"zero_recipes/once_per_node/{next(_calls)}"
    try:
        if rank() == first:
            return _work_and_publish(work, store, f"{call}/{first}")
        message = json.loads(_wait_for_message(store, f"{call}/{first}", first, f"rank {first}, which {doing}, died"))
        if "findings" in message:
            raise Refusal([Finding(**finding) for finding in message["findings"]])
    except Refusal:
        with contextlib.suppress(dist.DistError):  # leave together: the store ends with rank 0, others have yet to read
            barrier(store.clone(), dist.get_world_size(), f"{call}/refused", GATHER_SECONDS)
        raise
    if "error" in message:
        raise RuntimeError(f"rank {first}, which {doing}, failed: {message['error']}")
    return message["value"]


def _work_and_publish(work: Callable[[], Any], store: dist.Store, key: str) -> Any:
    store.set(f"{key}/pid", str(os.getpid()))
    try:
        value = work()
    except Refusal as refusal:
        store.set(key, json.dumps({"findings": [asdict(finding) for finding in refusal.findings]}))
        raise
    except BaseException as error:
        store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(key, json.dumps({"value": value}))
    return value


def _wait_for_message(store: dist.Store, key: str, first: int, died: str) -> bytes:
    died = f"{died} without a message"
    here = first >= rank() - int(os.environ["LOCAL_RANK"])  # a process of another node cannot be looked for
    try:
        while not store.check([key]):
            gone = here and store.check([f"{key}/pid"]) and not lives(int(store.get(f"{key}/pid")))
            if gone and not store.check([key]):
                raise RuntimeError(died)
            time.sleep(POLL_SECONDS)
        return store.get(key)
    except dist.DistError as error:  # the store lives in rank 0 or its launcher
        raise RuntimeError(f"rank 0 died, or {died}") from error
