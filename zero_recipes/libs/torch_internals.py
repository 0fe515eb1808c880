"""What is read from private parts of torch."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from zero_recipes.libs import parts_of_torch as parts


def storage_identity(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """The same for tensors that share memory, and for no others; fake tensors have no address to tell it by."""
    return tensor.device, parts.STORAGES.of(tensor.untyped_storage(), "_cdata")


def ddp_bucket_bytes(model: DistributedDataParallel) -> int:
    """Bytes of all gradient buckets of DistributedDataParallel; each goes through one all-reduce a step."""
    logged = parts.BUCKETS.of(model, "_get_ddp_logging_data")()  # rebuilt after the first backward pass
    buckets = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return sum(int(size) for size in str(buckets).split(",") if size.strip())
