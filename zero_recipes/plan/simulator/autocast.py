"""Autocast for the device that stands for a GPU: runs without DeepSpeed keep fp32 weights and compute in bf16 copies.

torch 2.13 registers autocast for its own devices in C++ (aten/src/ATen/autocast_mode.h: the lists below are those of
CUDA). A copy of a weight is made once in a forward pass and kept (autocast_mode.cpp `cached_cast`); backward keeps it
as long as it needs it.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

# AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32, of the operators that language models call
LOWER_PRECISION = ("addmm", "addmv", "baddbmm", "bmm", "linear", "matmul", "mm", "mv", "scaled_dot_product_attention")
FULL_PRECISION = ("cumsum", "exp", "layer_norm", "log", "log_softmax.int", "logsumexp", "pow.Tensor_Scalar", "prod")
FULL_PRECISION += ("rsqrt", "softmax.int", "softplus", "sum", "sum.dim_IntList", "rms_norm")

_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a weight's id: the weight, its copy
_libraries: list[torch.library.Library] = []  # a registration ends with its library


def set_up_autocast(dtype: torch.dtype) -> None:
    """Register; once in a process."""
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, target in ((LOWER_PRECISION, dtype), (FULL_PRECISION, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            aten.impl(name, _casting(getattr(getattr(torch.ops.aten, packet), overload or "default"), target))
    _libraries.extend([everything, aten])


def forget_copies() -> None:
    """The forward pass has ended."""
    _copies.clear()


def _casting(operator, dtype: torch.dtype):
    def call(*arguments, **keywords):
        without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(without):
            arguments, keywords = tree_map(lambda value: _cast(value, dtype), (arguments, keywords))
            return operator(*arguments, **keywords)

    return call


def _cast(value, dtype: torch.dtype):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    if not (value.is_leaf and value.requires_grad and dtype != torch.float32):
        return value.to(dtype)
    if id(value) not in _copies:
        _copies[id(value)] = value, value.to(dtype)
    return _copies[id(value)][1]
