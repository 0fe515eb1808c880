"""With ZeRO++'s quantized gradients (qgZ) in bf16 the gradient norm is infinite from the first step, or far off.

DeepSpeed's kernel reads every gradient as fp16: the bits of bf16 and fp32 become other numbers. It adds up the devices
of a node and divides by the nodes only: matrices' gradients are as many times the mean as a node has devices, while
vectors', by reduce-scatter, are the mean. Of a shape it checks only that 2 x world divides its size, and leaves out
parts of others (see `quantized_shape`). int4 has neither infinity nor NaN.

Library: DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py (`all_to_all_quant_reduce`), ops/csrc/quantization
    (pt_binding.cpp `ds_swizzle_quant`, swizzled_quantize.cu, quant_reduce.cu).
Upstream: deepspeedai/DeepSpeed#3992 (bf16), deepspeedai/DeepSpeed#6926 (a loss that stays); none found for the others.
Here: gradients go to the kernel in fp16's range, in groups that it can quantize, and become their mean over all ranks.
    What is not finite makes the whole gradient NaN on every rank.

See it: any machine

    import torch

    gradient = torch.tensor([1.0, 1e-3, 1e-5], dtype=torch.bfloat16)
    read = gradient.view(torch.float16)  # as pt_binding.cpp does: (__half*)input_vals.data_ptr()
    assert read[0] == 1.875 and read[1] > 0.3, read
"""

import math
from collections.abc import Sequence

import torch

from zero_recipes.engine.replacing import replaces

ROW = 256  # elements of a group, where the size allows it
LARGEST_GROUP = 40_960


def quantized_shape(shape: Sequence[int], world_size: int) -> tuple[int, ...] | None:
    """Return (rows, columns) as which DeepSpeed's kernel can quantize a gradient of `shape`. None where it can not.

    It makes max(rows, columns, world_size) groups.
    swizzled_quantize.cu leaves groups out where the ranks do not divide their number.
    It reads 8 values at once, and launches nothing for groups above LARGEST_GROUP.
    quant_reduce.cu takes maxima over warps of 32 threads, of which groups of up to 128 values have 16.
    Offsets are 32-bit integers.
    """
    size = math.prod(shape)
    if len(shape) < 2 or size >= 2**31:
        return None
    if size >= ROW * ROW and size % (ROW * world_size) == 0:
        return size // ROW, ROW
    groups = max(*shape, world_size)
    if len(shape) > 2 or groups % world_size or size % (8 * groups):
        return None
    if 128 < size // groups <= LARGEST_GROUP:
        return tuple(shape)
    return None


def scale_for_fp16(largest: torch.Tensor, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a power of two, an fp32 scalar: `world_size` values of `largest` times it add up to at most 2^15.

    `dtype`: the values', which must hold the power. 1 for an infinite `largest`.
    """
    _, exponent = torch.frexp(largest)  # largest < 2^exponent
    bits = (world_size - 1).bit_length()
    most = 15 if dtype == torch.float16 else 100
    power = (15 - bits - exponent).clamp(-126, most)
    return torch.exp2(torch.where(largest.isfinite(), power, 0).float())


def apply() -> None:
    """Hand gradients to DeepSpeed's kernel so that they become their mean over all ranks.

    fp16 ends at 6e-8 and 65504, bf16 does not: a power of two scales each tensor. It follows from the largest absolute
    value on any rank, since the ranks' values are added up.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    def largest_on_any_rank(tensors):
        """The largest absolute value of each tensor. Infinite for NaN, which a maximum over ranks may lose."""
        largest = torch.stack([torch.linalg.vector_norm(tensor, torch.inf).float() for tensor in tensors])
        largest = largest.where(largest.isfinite(), torch.inf)
        comm.all_reduce(largest, op=comm.ReduceOp.MAX)
        return largest

    @replaces(stage3, "all_to_all_quant_reduce")
    def all_to_all_quant_reduce(faulty, tensors, groups):
        world_size = comm.get_world_size()
        given = []
        quantized = []  # indices for the kernel
        for number, tensor in enumerate(tensors):
            shape = quantized_shape(tensor.shape, world_size)
            if shape is not None:
                quantized.append(number)
            given.append(tensor.view(shape or -1))  # vectors go through reduce-scatter
        if not quantized:
            return faulty(given, groups)
        to_mean = []  # factors
        largest = largest_on_any_rank([given[number] for number in quantized])
        for number, most in zip(quantized, largest, strict=True):
            dtype = tensors[number].dtype
            scale = scale_for_fp16(most, world_size, dtype)
            given[number] = (given[number] * scale.to(dtype)).half()
            factor = 1 / scale / get_accelerator().device_count()
            to_mean.append(torch.where(most.isfinite(), factor, torch.nan))
        out = faulty(given, groups)
        for number, factor in zip(quantized, to_mean, strict=True):
            out[number] = out[number].float().mul_(factor).to(tensors[number].dtype)
        return out
