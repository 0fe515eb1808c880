"""DeepSpeed's quantizer op in plain torch, a stand-in for tests on CPUs only: no run uses it.

The contract is that of the CUDA op in DeepSpeed 0.19.8 (ops/csrc/quantization/pt_binding.cpp; the number format is in
includes/quantization_utils.h, Params<Symmetric>): groups of equal size, one fp32 scale each, int8 or two int4 in a
byte. As there, every input is read as fp16 whatever its dtype says, and every output is fp16. ZeRO++,
arXiv:2306.10209, sections 3.1 (qwZ) and 3.3 (qgZ).

Where the CUDA op would leave memory unwritten, read the next group or launch nothing, this one raises ValueError.
"""

import torch

Symmetric = 0


def quantize(values, groups, bits, _kind):
    """(int8 of the input's shape, its last dimension halved for 4 bits; fp32 scales, one a group)."""
    _refuse(values.numel(), groups, smallest=8, largest=16_384)  # quantize.cu: 4 x 256 threads of 16 values
    q, scales = _quantize(_as_read(values), groups, bits)
    shape = list(values.shape)
    shape[-1] //= 8 // bits
    return q.view(shape), scales


def dequantize(q, scales, groups, bits, _kind):
    shape = list(q.shape)
    shape[-1] *= 8 // bits
    return _dequantize(q, scales, groups, bits).half().view(shape)


def swizzle_quant(values, groups, bits, _kind, _pipeline, nodes, devices):
    """Quantized, and in the order of the devices of a node: each gets, of all nodes, the parts of its like."""
    refuse_swizzled(values.numel(), groups, nodes, devices)
    parts = _as_read(values).view(nodes, devices, -1).transpose(0, 1)
    return _quantize(parts.contiguous(), groups, bits)


def quantized_reduction(q, scales, in_groups, out_groups, bits, _kind, devices):
    """The sum over the devices of a node, quantized again. The kernel adds and does not divide (quant_reduce.cu)."""
    refuse_reduced(q.numel() * (8 // bits) // devices, out_groups)
    total = _dequantize(q, scales, in_groups, bits).half().view(devices, -1).sum(0)
    return _quantize(total, out_groups, bits)


def refuse_swizzled(elements, groups, nodes, devices):
    """swizzled_quantize.cu: 512 threads take 16 values each, up to five times. `groups_per_partition`: what is left of
    the groups has no block, and its scales are never written."""
    _refuse(elements, groups, smallest=8, largest=5 * 512 * 16)
    if groups % (nodes * devices):
        raise ValueError(f"{groups} groups on {nodes} x {devices} devices")


def refuse_reduced(elements, groups):
    """quant_reduce.cu: 1,024 threads take 8 values each, up to twelve times. Maxima are over whole warps of 32 threads,
    half of which do not exist where a group has 128 values."""
    _refuse(elements, groups, smallest=136, largest=12 * 1024 * 8)


def _refuse(elements, groups, smallest, largest):
    """A group is whole, is read by 8 values at once, and fits the block that is launched for it."""
    size, rest = divmod(elements, groups)
    if rest or size % 8 or not smallest <= size <= largest:
        raise ValueError(f"{elements} elements in {groups} groups")


def _as_read(values: torch.Tensor) -> torch.Tensor:
    """The bits as the kernel takes them: `(__half*)input_vals.data_ptr()`."""
    return values.contiguous().view(-1).view(torch.float16)[: values.numel()]


def _quantize(values, groups, bits):
    values = values.reshape(groups, -1).float()
    largest = values.abs().amax(1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, 2**bits / (2 * largest))
    q = (values * scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8).view(-1)
    if bits == 4:
        q = (q[0::2] & 0x0F) | (q[1::2] << 4)
    return q, (1 / scale).view(-1)  # (groups, 1) there: gloo compares shapes, NCCL does not


def _dequantize(q, scales, groups, bits):
    q = q.view(-1)
    if bits == 4:
        q = torch.stack([(q << 4) >> 4, q >> 4], 1).view(-1)  # arithmetic shifts keep the sign
    return (q.view(groups, -1).float() * scales.view(groups, 1)).view(-1)
