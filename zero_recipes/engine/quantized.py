"""How much of a model's gradients ZeRO++ sends quantized."""

import os

import torch

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.process import local_world_size
from zero_recipes.engine.deepspeed import whole_shape
from zero_recipes.engine.faults.quantized_gradients import quantized_shape


def share_not_quantized(model: torch.nn.Module, strategy: Strategy) -> float | None:
    """Return the share of a model's gradient elements that qgZ sends as they are. None without qgZ.

    It quantizes between nodes only.
    """
    if not strategy.ds.quantizes_gradients:
        return None
    world_size = strategy.world_size
    between_nodes = strategy.zero_stage == 3 and world_size > local_world_size(os.environ, world_size)
    elements = 0
    left_out = 0
    for shape in [whole_shape(p) for p in model.parameters() if p.requires_grad]:
        elements += shape.numel()
        if not between_nodes or quantized_shape(shape, world_size) is None:
            left_out += shape.numel()
    return left_out / max(elements, 1)
