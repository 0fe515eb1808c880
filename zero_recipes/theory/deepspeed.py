"""What DeepSpeed 0.19.8 moves: swap files, and what a resume reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zero_recipes.config.ds_config import LEAST_SWAPPED, DsConfig, number_in


class SwapTensor(NamedTuple):
    """One tensor of a model, as far as swapping depends on it. `size`: elements."""

    size: int
    is_matrix: bool
    trained: bool


def swapped_bytes(config: DsConfig, tensors: Iterable[SwapTensor], ranks: int, width: int = 2) -> int:
    """Bytes of one process's swap files on NVMe under DeepSpeed 0.19.8, with `width` bytes a parameter.

    Of the optimizer the fp32 master, momentum and variance, a group at a time (the Trainer's two: vectors have no
    weight decay), and the fp32 gradients that its step reads (swap_tensor/optimizer_utils.py `_swap_out_gradients`).
    What is smaller than MIN_AIO_BYTES, 1 MiB, or than aio.block_size stays in memory. tests/engine/test_infinity.py
    holds it against the files.
    """
    least = max(LEAST_SWAPPED, number_in(config.aio, "block_size", 0))
    parts = [tensor._replace(size=-(-tensor.size // ranks)) for tensor in tensors]
    total = 0
    if config.offload_param == "nvme" and config.stage == 3:
        total += sum(width * part.size for part in parts if width * part.size >= least)
    if config.offload_optimizer == "nvme" and config.stage == 3:
        trained = [part for part in parts if part.trained]
        groups = [sum(part.size for part in trained if part.is_matrix is matrix) for matrix in (True, False)]
        total += sum(12 * size for size in groups if 4 * size >= least)
        total += sum(4 * part.size for part in trained if 4 * part.size >= least)
    return total


def read_at_resume(weights: float, optimizer: float, zero_stage: int | None, world_size: int) -> int:
    """Bytes that each process reads into the host's memory at once to go on from a checkpoint.

    DeepSpeed 0.19.8, runtime/engine.py `load_checkpoint`: first, below stage 3, mp_rank_00_model_states.pt with all the
    weights (at stage 0 the optimizer's states too), then its own part of the optimizer's states with the fp32 weights.
    Both by torch.load(map_location="cpu"), so they stand beside what training holds there (deepspeedai/DeepSpeed#3938).
    Without DeepSpeed the weights are mapped and the optimizer's states go to the device tensor by tensor.
    """
    if zero_stage is None:
        return 0
    if zero_stage == 0:
        return int(weights + optimizer)
    return int(max(weights if zero_stage < 3 else 0, optimizer / world_size))
