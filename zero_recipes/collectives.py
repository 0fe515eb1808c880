"""Bytes that PyTorch's own collectives carry, for engines that have no logger of their own (FSDP2)."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


def _size(tensors) -> int:
    listed = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return sum(_size(t) if isinstance(t, (list, tuple)) else t.numel() * t.element_size() for t in listed)


# operators (torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp): the collective, and the bytes of the full,
# unsharded tensor by its arguments
_OPERATORS = {
    "c10d::_allgather_base_": ("all_gather", lambda args: _size(args[0])),  # output, input
    "c10d::allgather_": ("all_gather", lambda args: _size(args[0])),  # output lists, inputs
    "c10d::_reduce_scatter_base_": ("reduce_scatter", lambda args: _size(args[1])),  # output, input
    "c10d::allreduce_": ("all_reduce", lambda args: _size(args[0])),
    "c10d::broadcast_": ("broadcast", lambda args: _size(args[0])),
    "c10d::alltoall_base_": ("all_to_all", lambda args: _size(args[1])),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", lambda args: _size(args[0]) * args[1]),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", lambda args: _size(args[0])),
    "_c10d_functional::all_reduce": ("all_reduce", lambda args: _size(args[0])),
    "_c10d_functional::all_reduce_": ("all_reduce", lambda args: _size(args[0])),
}


class CountCollectives(TorchDispatchMode):
    """Adds up, while it is in force, {collective: bytes of the full tensors}; autograd's threads are counted too."""

    def __init__(self):
        super().__init__()
        self.bytes: dict[str, int] = {}

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        counted, self.bytes = self.bytes, {}
        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own collectives come by below, on plain tensors
        known = _OPERATORS.get(func._schema.name)
        if known is not None:
            collective, size = known
            self.bytes[collective] = self.bytes.get(collective, 0) + size(args)
        return func(*args, **(kwargs or {}))


def in_force(mode: torch.utils._python_dispatch.TorchDispatchMode, on: bool) -> None:
    """Switch a mode on or off where no `with` block can span what is counted."""
    mode.__enter__() if on else mode.__exit__(None, None, None)
