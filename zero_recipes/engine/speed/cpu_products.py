"""In bf16 a CPU without AVX-512 takes a hundred times as long as in fp32.

torch falls back to a plain loop for 16-bit matrix products: 512 x 512 x 512 in bf16 take 220 ms, and 2 ms in fp32 (2
cores of an AMD EPYC, AVX2). The loop, too, sums in fp32 and rounds once.

Library: torch 2.13, aten/src/ATen/native/cpu/BlasKernel.cpp (`gemm_core_`).
Upstream: none found.
Here: such products are computed in fp32 and rounded once. Only the order of sums differs.
"""

import functools
import warnings
from collections.abc import Callable

import torch

OPERATORS = ("mm", "addmm", "bmm", "baddbmm")


def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the 16-bit types that this CPU multiplies in a plain loop.

    Private: torch.ops.mkldnn._is_mkldnn_bf16_supported and ..._fp16_supported. No public function tells.
    """
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_fast in supported.items() if not is_fast)


@functools.cache
def multiply_in_fp32() -> torch.library.Library:
    """Let this process multiply `slow_dtypes` in fp32 from now on, while the library that is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    slow = slow_dtypes()
    if not slow:
        return library
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in OPERATORS:
            kernel = _kernel(getattr(torch.ops.aten, name).out, slow)
            library.impl(name, kernel, "CPU", allow_override=True)
        library.impl("mm.out", functools.partial(_mm_into, slow), "CPU", allow_override=True)
    return library


def _kernel(with_out: Callable, slow: frozenset[torch.dtype]) -> Callable:
    """Make the operator's replacement. `with_out`: its form that writes into a tensor, which stays torch's own."""

    def multiply(*tensors: torch.Tensor, **scales: float) -> torch.Tensor:
        dtype = tensors[-1].dtype
        if dtype in slow and all(tensor.dtype == dtype for tensor in tensors):  # torch refuses mixed ones
            tensors = [tensor.float() for tensor in tensors]
        product = with_out(*tensors, **scales, out=tensors[-1].new_empty(0))
        return product.to(dtype)

    return multiply


def _mm_into(slow: frozenset[torch.dtype], first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor):
    """Multiply into `out`, as TRL's fused LM head does (trl/kernels/chunked_logprob.py) with tiles of logits."""
    if out.dtype in slow and first.dtype == second.dtype == out.dtype:
        return out.copy_(torch.mm(first.float(), second.float()))
    out.resize_(len(first), second.shape[1])
    return torch.ops.aten.addmm.out(out, first, second, beta=0, out=out)  # torch's own mm, too
