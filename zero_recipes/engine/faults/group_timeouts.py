"""A run ends after 10 minutes with "Watchdog caught collective operation timeout" though `ddp_timeout` is longer.

DeepSpeed hands no timeout to the process groups that it makes, so torch takes its default, 10 minutes under NCCL. The
engine makes a second group of all ranks (utils/groups.py `_clone_world_group`), in which the others wait while one rank
saves a large model.

Library: DeepSpeed 0.19.8, comm/torch.py (`TorchBackend.new_group`).
Upstream: deepspeedai/DeepSpeed#7533.
Here: DeepSpeed's groups get the run's timeout.

See it: one CPU

    from datetime import timedelta

    import deepspeed, torch

    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=4321))
    group = deepspeed.comm.new_group([0])
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    assert timeout != timedelta(seconds=4321), timeout
"""

from datetime import timedelta

import torch

from zero_recipes.engine.replacing import replaces


def apply(seconds: int) -> None:
    """Give the groups that DeepSpeed makes from now on a timeout of so many seconds."""
    from deepspeed.comm.torch import TorchBackend

    @replaces(TorchBackend, "new_group")
    def new_group(without_timeout, self, ranks):
        return torch.distributed.new_group(ranks, timeout=timedelta(seconds=seconds))
