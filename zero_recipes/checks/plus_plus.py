"""Checks of ZeRO++ against the model: sizes that its quantiser takes. File names are those of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zero_recipes.refusal import Finding
from zero_recipes.strategy import Strategy


def quantised_findings(strategy: Strategy, sizes: Sequence[int]) -> Iterator[Finding]:
    """`sizes`: elements of each tensor of the model."""
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    odd = [size for size in sizes if -(-size // strategy.world_size) % 8]
    if zero.get("zero_quantized_weights") and zero.get("stage") == 3 and odd:
        yield Finding(
            f"zero_quantized_weights with tensors whose part on a rank is no multiple of 8: {_listed(odd)} elements on "
            f"{strategy.world_size} processes",
            "runtime/zero/partition_parameters.py, CUDAQuantizer.quantize stops on it in the first forward pass: "
            '"Qantized weight requires the number of weights be a multiple of 8".',
            "Another number of processes, a model whose sizes divide, or remove it.",
        )


def _listed(sizes: Sequence[int]) -> str:
    distinct = sorted(set(sizes))
    return ", ".join(f"{size:,}" for size in distinct[:3]) + (" ..." if len(distinct) > 3 else "")
