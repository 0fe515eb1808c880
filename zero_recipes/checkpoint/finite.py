"""Are the numbers of a saved model numbers? One tensor is read at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from zero_recipes.checkpoint.verify import ADAPTER, INDEX, SINGLE, NotWhole


def refuse_nonfinite(folder: Path) -> None:
    """Raise NotWhole where a saved model or adapter, whole by its headers, holds NaN or infinite numbers."""
    for fault in nonfinite(weights_in(folder)):
        raise NotWhole(f"{folder} is not whole: {fault}.")


def weights_in(folder: Path) -> list[Path]:
    """The files of the model's or adapter's tensors."""
    for name in (ADAPTER, SINGLE):
        if (folder / name).is_file():
            return [folder / name]
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    return [folder / shard for shard in sorted(set(placed.values()))]


def nonfinite(files: list[Path]) -> Iterator[str]:
    """What is wrong with each tensor that holds such numbers."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if count := count_nonfinite(file.get_tensor(name)):
                    yield f"{name} has {count:,} numbers that are NaN or infinite"


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Numbers of a tensor that are NaN or infinite; 0 for one of integers."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:  # torch has no isfinite for 8 bits
        return 0
    finite = torch.isfinite(tensor)
    return 0 if finite.all() else int((~finite).sum())
