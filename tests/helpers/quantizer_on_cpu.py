"""DeepSpeed's quantizer op in plain torch, a stand-in for tests on CPUs only: no run uses it.

The contract is that of the CUDA op in DeepSpeed 0.19.8 (ops/csrc/quantization/pt_binding.cpp; the number format is in
includes/quantization_utils.h, Params<Symmetric>): groups of equal size, one fp32 scale each, int8 or two int4 in a
byte. As there, every input is read as fp16 whatever its dtype says, and every output is fp16. ZeRO++,
arXiv:2306.10209, sections 3.1 (qwZ) and 3.3 (qgZ).
"""

import torch

Symmetric = 0


def quantize(values, groups, bits, _kind):
    """(int8 of the input's shape, its last dimension halved for 4 bits; fp32 scales, one a group)."""
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
    parts = _as_read(values).view(nodes, devices, -1).transpose(0, 1)
    return _quantize(parts.contiguous(), groups, bits)


def quantized_reduction(q, scales, in_groups, out_groups, bits, _kind, devices):
    """The sum over the devices of a node, quantized again. The kernel adds and does not divide (quant_reduce.cu)."""
    total = _dequantize(q, scales, in_groups, bits).half().view(devices, -1).sum(0)
    return _quantize(total, out_groups, bits)


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
