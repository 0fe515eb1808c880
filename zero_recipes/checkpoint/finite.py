"""Are the numbers of a saved model numbers? One tensor is read at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from zero_recipes.checkpoint.weights import NotWhole, entries_of


def refuse_nonfinite(folder: Path) -> None:
    """Raise NotWhole where a saved model or adapter, whole by its headers, holds NaN or infinite numbers."""
    for fault in nonfinite(sorted({entry.file for entry in entries_of(folder).values()})):
        raise NotWhole(f"{folder} is not whole: {fault}.")


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
