"""One process under torchrun trains under DistributedDataParallel: its buckets hold every gradient once more.

accelerate takes any process with LOCAL_RANK for one of several. torchrun sets it for a single one too.

Library: accelerate 1.15, state.py (`PartialState._prepare_backend`).
Upstream: none found.
Here: a world of one forgets LOCAL_RANK before there is a state.

See it: one GPU

    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == 1
    assert accelerator.distributed_type != "NO", accelerator.distributed_type
"""

import os


def forget_local_rank() -> None:
    """Let accelerate take this process for the only one."""
    os.environ.pop("LOCAL_RANK", None)
