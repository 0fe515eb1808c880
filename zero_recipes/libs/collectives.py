"""Where the collectives of an engine can be counted: DeepSpeed's backend, DDP's buckets."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

# methods of DeepSpeed's backend (0.19.8, comm/torch.py; its decorators hide their signatures): the collective, the
# argument with the full tensor, the names of the arguments in order
COLLECTIVES = {
    "all_reduce": ("all_reduce", "tensor", ("tensor", "op", "group")),
    "inference_all_reduce": ("all_reduce", "tensor", ("tensor", "op", "group")),
    "all_reduce_coalesced": ("all_reduce", "tensors", ("tensors", "op", "group")),
    "all_gather": ("all_gather", "tensor_list", ("tensor_list", "tensor", "group")),
    "all_gather_into_tensor": ("all_gather", "output_tensor", ("output_tensor", "input_tensor", "group")),
    "all_gather_base": ("all_gather", "output_tensor", ("output_tensor", "input_tensor", "group")),
    "all_gather_coalesced": ("all_gather", "output_tensors", ("output_tensors", "input_tensors", "group")),
    "reduce_scatter": ("reduce_scatter", "input_list", ("output", "input_list", "op", "group")),
    "reduce_scatter_tensor": ("reduce_scatter", "input_tensor", ("output_tensor", "input_tensor", "op", "group")),
    "all_to_all": ("all_to_all", "input_tensor_list", ("output_tensor_list", "input_tensor_list", "group")),
    "all_to_all_single": ("all_to_all", "input", ("output", "input", "output_splits", "input_splits", "group")),
    "reduce": ("reduce", "tensor", ("tensor", "dst", "op", "group")),
    "broadcast": ("broadcast", "tensor", ("tensor", "src", "group")),
}


def communication_backend():
    """The object whose methods carry DeepSpeed's collectives.

    Private: `cdb` and the methods of COLLECTIVES (DeepSpeed 0.19.8, comm/comm.py and comm/torch.py). DeepSpeed's own
    comms logger waits for the device at every collective and does not know the group.
    """
    from deepspeed import comm

    return comm.comm.cdb


def ddp_bucket_bytes(model: DistributedDataParallel) -> int:
    """Bytes of all gradient buckets of DistributedDataParallel; each goes through one all-reduce a step.

    Private: `_get_ddp_logging_data` (torch 2.13, nn/parallel/distributed.py). No public name leads to the sizes.
    """
    logged = model._get_ddp_logging_data()  # rebuilt after the first backward pass
    buckets = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return sum(int(size) for size in str(buckets).split(",") if size.strip())
