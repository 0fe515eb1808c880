"""One process of each node works, the others wait for its word: on the rendezvous store, not in a collective.

A collective would end every rank after `ddp_timeout` where tokenising takes longer, and hide which process died.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_recipes.core.errors import Finding, Refusal
from zero_recipes.core.process import lives, rank

POLL_SECONDS = 0.1
GATHER_SECONDS = 10.0
_calls = itertools.count()  # every process counts the same calls


def once_per_node(work: Callable[[], Any]) -> Any:
    """What `work` returns (as JSON), called on the first process of each node only. Every process calls this.

    Raises Refusal on every process where `work` is refused; RuntimeError on the others where it fails or its process
    dies, with that process's rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    store = _store()
    first = rank() - int(os.environ["LOCAL_RANK"])
    call = f"zero_recipes/handoff/{next(_calls)}"
    try:
        if rank() == first:
            return _work_and_tell(work, store, f"{call}/{first}")
        word = json.loads(_wait_for_word(store, f"{call}/{first}", first))
        if "findings" in word:
            raise Refusal.of([Finding(**finding) for finding in word["findings"]])
    except Refusal:
        _gather_the_refused(store, f"{call}/refused")
        raise
    if "error" in word:
        raise RuntimeError(f"rank {first}, which prepares the data of this machine, failed: {word['error']}")
    return word["value"]


def _store() -> dist.Store:
    """A connection to the store at which the processes have met (rendezvous.py), of this call's own."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=GATHER_SECONDS)
        )
    except dist.DistError as error:
        raise RuntimeError("rank 0 died: the store that it kept is gone") from error


def _work_and_tell(work: Callable[[], Any], store: dist.Store, place: str) -> Any:
    store.set(f"{place}/pid", str(os.getpid()))
    try:
        value = work()
    except Refusal as refusal:
        store.set(place, json.dumps({"findings": [asdict(finding) for finding in refusal.findings]}))
        raise
    except BaseException as error:
        store.set(place, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(place, json.dumps({"value": value}))
    return value


def _wait_for_word(store: dist.Store, place: str, first: int) -> bytes:
    died = f"rank {first}, which prepares the data of this machine, died without a word"
    try:
        while not store.check([place]):
            gone = store.check([f"{place}/pid"]) and not lives(int(store.get(f"{place}/pid")))
            if gone and not store.check([place]):
                raise RuntimeError(died)
            time.sleep(POLL_SECONDS)
        return store.get(place)
    except dist.DistError as error:  # the store lives in rank 0 or its launcher
        raise RuntimeError(f"rank 0 died, or {died}") from error


def _gather_the_refused(store: dist.Store, place: str) -> None:
    """Leave together: the store ends with rank 0, and the others have yet to read why."""
    deadline = time.monotonic() + GATHER_SECONDS
    with contextlib.suppress(dist.DistError):
        count = store.add(place, 1)
        while count < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            count = store.add(place, 0)
