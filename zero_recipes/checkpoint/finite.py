"""Are the numbers of saved tensors numbers? One tensor is read at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open


def nonfinite(tensors: Mapping[str, Path]) -> Iterator[str]:
    """What is wrong with each tensor that holds NaN or infinite numbers. `tensors`: {name: its safetensors file}."""
    for name, file in sorted(tensors.items(), key=lambda item: (item[1], item[0])):
        with safe_open(file, "pt") as opened:
            count = count_nonfinite(opened.get_tensor(name))
        if count:
            yield f"{name} has {count:,} numbers that are NaN or infinite"


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Numbers of a tensor that are NaN or infinite; 0 for one of integers."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:  # torch has no isfinite for 8 bits
        return 0
    finite = torch.isfinite(tensor)
    return 0 if finite.all() else int((~finite).sum())
