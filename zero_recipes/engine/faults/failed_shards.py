"""A save or load of FSDP2's shards that fails passes every `except Exception`, and no record of the failure is left.

torch raises a CheckpointException, which holds all ranks' failures, and is a BaseException.

Library: torch 2.13, distributed/checkpoint/api.py (`CheckpointException`).
Upstream: none found.
Here: the rank that failed raises its own error, the others say whose it was.

See it: any machine

    from torch.distributed.checkpoint import CheckpointException

    assert not issubclass(CheckpointException, Exception)
"""

import contextlib
from collections.abc import Iterator

from torch.distributed.checkpoint import CheckpointException

from zero_recipes.core.process import rank
from zero_recipes.core.run_end import PeerFailed


@contextlib.contextmanager
def failures_raised() -> Iterator[None]:
    """Within it, what a rank failed of in a save or load of shards is raised there; the others raise PeerFailed."""
    try:
        yield
    except CheckpointException as raised:
        first = min(raised.failures)
        error, _ = raised.failures[first]
        if first == rank():
            raise error from None
        raise PeerFailed(f"rank {first} failed: {type(error).__name__}: {error}") from None
