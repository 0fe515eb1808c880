"""DeepSpeed's quantizer kernels against the stand-in of the tests: quantizer.py ROWS.jsonl [--rehearse]

tests/helpers/quantizer_on_cpu.py stands in for the CUDA op wherever ZeRO++ is tested; here both get the same numbers.
Rounding may differ by one step where a value lies between two, for the kernel computes in fp16 what the stand-in
computes in fp32. --rehearse: the stand-in against itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SIZES = (2048, 16384, 1048576)  # elements
GROUPS = (1, 16, 128)
SCALES = (1.0, 1e-3, 3e-7)  # RMS of the values; the last underflows in fp16
DEVICES = 4
LARGEST_GROUP = 8192  # elements; DeepSpeed's own groups hold at most 8,000 (partition_parameters.py, CUDAQuantizer)


def main(arguments: list[str]) -> None:
    import torch

    from tests.helpers import quantizer_on_cpu as stand_in

    path, rehearse = Path(arguments[0]), "--rehearse" in arguments
    device = "cpu" if rehearse else "cuda"
    start = time.time()
    if rehearse:
        kernels = stand_in
    else:
        from deepspeed.ops.op_builder import QuantizerBuilder

        kernels = QuantizerBuilder().load(verbose=True)
    print(f"quantizer loaded in {time.time() - start:.0f} s", flush=True)
    with open(path, "a") as file:
        for row in _compared(torch, kernels, stand_in, device):
            file.write(json.dumps({"part": 5, "rehearsal": rehearse} | row) + "\n")
            file.flush()


def _compared(torch, kernels, stand_in, device: str) -> Iterator[dict[str, Any]]:
    """One row for each operator, size, number of groups, width and scale that the kernels take."""
    torch.manual_seed(0)
    for size in SIZES:
        for groups in GROUPS:
            for bits in (4, 8):
                for rms in SCALES:
                    values = (torch.randn(size) * rms).half()
                    about = {"elements": size, "groups": groups, "bits": bits, "rms": rms}
                    if not 64 <= size // groups <= LARGEST_GROUP:  # beyond it no kernel starts, and nothing is said
                        continue
                    for name, compared in (("quantize", _plain), ("swizzle", _swizzled)):
                        row = {"case": f"{name} {size} {groups} {bits} {rms}", "operator": name} | about
                        try:
                            yield (
                                row
                                | {"status": "ok"}
                                | compared(torch, kernels, stand_in, values, groups, bits, device)
                            )
                        except Exception as error:  # a kernel that refuses is a row; the rest goes on
                            yield row | {"status": "failed", "error": f"{type(error).__name__}: {error}"[:500]}


def _plain(torch, kernels, stand_in, values, groups: int, bits: int, device: str) -> dict[str, Any]:
    kind = kernels.Symmetric
    q, scales = kernels.quantize(values.to(device), groups, bits, kind)
    expected_q, expected_scales = stand_in.quantize(values, groups, bits, stand_in.Symmetric)
    back = kernels.dequantize(q, scales, groups, bits, kind).cpu()
    expected = stand_in.dequantize(expected_q, expected_scales, groups, bits, stand_in.Symmetric)
    return _difference(torch, q, scales, expected_q, expected_scales, bits) | {
        "largest_difference": float((back.float().view(-1) - expected.float().view(-1)).abs().max()),
        "error_of_kernel": float((back.float().view(-1) - values.float()).norm() / values.float().norm()),
        "error_of_stand_in": float((expected.float().view(-1) - values.float()).norm() / values.float().norm()),
    }


def _swizzled(torch, kernels, stand_in, values, groups: int, bits: int, device: str) -> dict[str, Any]:
    """The two kernels of a reduction: swizzled quantization, then the sum over the devices of a node."""
    groups = max(groups, DEVICES)
    q, scales = kernels.swizzle_quant(values.to(device), groups, bits, kernels.Symmetric, 1, 1, DEVICES)
    expected = stand_in.swizzle_quant(values, groups, bits, stand_in.Symmetric, 1, 1, DEVICES)
    found = _difference(torch, q, scales, *expected, bits)
    reduced = kernels.quantized_reduction(q, scales, groups, groups // DEVICES, bits, kernels.Symmetric, DEVICES)
    total = stand_in.quantized_reduction(*expected, groups, groups // DEVICES, bits, stand_in.Symmetric, DEVICES)
    after = _difference(torch, *reduced, *total, bits)
    return found | {f"reduced_{name}": value for name, value in after.items()}


def _difference(torch, q, scales, expected_q, expected_scales, bits: int) -> dict[str, Any]:
    """Share of equal numbers, the largest difference in steps, of the scales the largest relative one."""
    ours, theirs = _unpacked(torch, q.cpu(), bits), _unpacked(torch, expected_q, bits)
    scales, expected_scales = scales.cpu().float().view(-1), expected_scales.float().view(-1)
    relative = (scales - expected_scales).abs() / expected_scales.abs().clamp_min(1e-30)
    return {
        "equal": float((ours == theirs).float().mean()),
        "largest_step": int((ours - theirs).abs().max()),
        "scales_relative": float(relative.max()),
    }


def _unpacked(torch, q, bits: int):
    q = q.contiguous().view(-1).view(torch.int8)
    return torch.stack([(q << 4) >> 4, q >> 4], 1).view(-1).int() if bits == 4 else q.int()


if __name__ == "__main__":
    main(sys.argv[1:])
