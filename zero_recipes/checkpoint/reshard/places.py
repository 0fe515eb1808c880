"""Where each parameter's states lie in the files of a DeepSpeed checkpoint.

Layouts as DeepSpeed 0.19.8 writes them; paths below are relative to deepspeed/runtime.

- Stages 1 and 2 (zero/stage_1_and_2.py, `state_dict`): the parameters of a group lie one after another, padded where
  `param_alignment_paddings` says, and are cut into equal partitions. The order is that of `param_shapes`
  (engine.py `_get_zero_param_shapes`), which is right with round_robin_gradients too; `param_slice_mappings` is not.
- Stage 3 (zero/stage3.py, `_rigid_state_dict`): each parameter is cut into equal partitions, ceil(elements / world)
  each, and every rank's group holds its partitions of the group's parameters one after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Piece(NamedTuple):
    """Where a part of a parameter lies: elements start to start + count of a rank's flat group."""

    rank: int
    start: int
    count: int


class Place(NamedTuple):
    """A parameter: the flat group that holds it, its shape, and its pieces in order."""

    group: int
    shape: tuple[int, ...]
    pieces: list[Piece]


def places_of(
    flats: list[torch.Tensor],
    states: dict[str, Any],
    stage: int,
    world_size: int,
    shapes: list[dict[str, tuple[int, ...]]],
) -> dict[str, Place]:
    """Where every parameter lies, by name. `states`: the optimizer's of rank 0, whose partitions are never cut short;
    `flats`: their flat groups; `shapes`: of the parameters of each group, in the order of `param_shapes`."""
    places = {}
    for group, (flat, named) in enumerate(zip(flats, shapes, strict=True)):
        start = 0
        aligned = states.get("param_alignment_paddings")  # not at stage 3, nor before DeepSpeed 0.19
        paddings = aligned[group] if aligned else [0] * len(named)
        for (name, shape), padding in zip(named.items(), paddings, strict=True):
            count = torch.Size(shape).numel()
            if stage == 3:
                part = -(-count // world_size)
                left = [max(0, min(part, count - rank * part)) for rank in range(world_size)]
                pieces = [Piece(rank, start, size) for rank, size in enumerate(left) if size]
                start += part
            else:
                pieces = _cut(start, count, flat.numel())
                start += count + padding
            places[name] = Place(group, shape, pieces)
    return places


def _cut(start: int, count: int, partition: int) -> list[Piece]:
    """Elements start to start + count of the whole group, cut at the borders of the ranks' partitions."""
    pieces = []
    while count:
        rank, inside = divmod(start, partition)
        size = min(count, partition - inside)
        pieces.append(Piece(rank, inside, size))
        start, count = start + size, count - size
    return pieces
