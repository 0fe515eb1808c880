"""The "auto" values of a DeepSpeed configuration that neither transformers nor DeepSpeed knows: ours to fill in."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from zero_recipes.config.ds_view import OFFLOADS
from zero_recipes.core.process import local_world_size

NVME_PATH = "ZERO_RECIPES_NVME_PATH"


def needs_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a buffer is to be sized by the model."""
    zero = config.get("zero_optimization")
    swapped = zero.get("offload_param") if isinstance(zero, dict) else None
    return isinstance(swapped, dict) and swapped.get("buffer_size") == "auto"


def fill_own_autos(
    config: Mapping[str, Any],
    nvme_path: str | None,
    world_size: int,
    environment: Mapping[str, str],
    sizes: Sequence[int] | None,
) -> dict[str, Any]:
    """A copy of `config` with these filled in; what cannot be known stays "auto" and is found by the checks.

    zero_hpz_partition_size: the processes of one machine. nvme_path: the recipe's key, else the environment's
    ZERO_RECIPES_NVME_PATH. offload_param.buffer_size: elements of the model's largest partition (`sizes`: of each of
    its tensors; stage 3 rounds up), the least that DeepSpeed 0.19.8 takes (runtime/swap_tensor/
    partitioned_param_swapper.py, get_buffer).
    """
    filled = copy.deepcopy(dict(config))
    zero = filled.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return filled  # refused by its schema
    if zero.get("zero_hpz_partition_size") == "auto":
        zero["zero_hpz_partition_size"] = local_world_size(environment, world_size)
    path = nvme_path or environment.get(NVME_PATH)
    for block in (zero[key] for key in OFFLOADS if isinstance(zero.get(key), dict)):
        if block.get("nvme_path") == "auto" and path:
            block["nvme_path"] = path
    if needs_sizes(filled) and sizes:
        zero["offload_param"]["buffer_size"] = math.ceil(max(sizes) / world_size)
    return filled
