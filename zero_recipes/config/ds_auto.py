"""The "auto" values of a DeepSpeed configuration that neither transformers nor DeepSpeed knows: ours to fill in."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from zero_recipes.core.errors import Refusal
from zero_recipes.core.process import local_world_size

NVME_PATH = "ZERO_RECIPES_NVME_PATH"
ON_NVME = ("offload_optimizer", "offload_param")


def fill_own_autos(
    config: dict[str, Any], values: Mapping[str, Any], world_size: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """A copy of `config` with these filled in; what cannot be known stays "auto" and is found by the checks.

    zero_hpz_partition_size: the processes of one machine. nvme_path: the recipe's key, else the environment's
    ZERO_RECIPES_NVME_PATH. offload_param.buffer_size: elements of the model's largest partition, the least that
    DeepSpeed 0.19.8 takes (runtime/swap_tensor/partitioned_param_swapper.py, get_buffer).
    """
    filled = copy.deepcopy(config)
    zero = filled.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return filled  # refused by its shape
    if zero.get("zero_hpz_partition_size") == "auto":
        zero["zero_hpz_partition_size"] = local_world_size(environment, world_size)
    path = values["nvme_path"] or environment.get(NVME_PATH)
    for block in (zero[key] for key in ON_NVME if isinstance(zero.get(key), dict)):
        if block.get("nvme_path") == "auto" and path:
            block["nvme_path"] = path
    swapped = zero.get("offload_param")
    if isinstance(swapped, dict) and swapped.get("buffer_size") == "auto":
        swapped["buffer_size"] = largest_partition(values, world_size) or "auto"
    return filled


def largest_partition(values: Mapping[str, Any], world_size: int) -> int | None:
    """Elements of the largest tensor's part on one rank (stage 3 rounds up); None where the model cannot be found."""
    from zero_recipes.models.load import load_config
    from zero_recipes.theory.lower_bounds import parameter_sizes

    arguments = SimpleNamespace(**values)
    try:
        sizes = parameter_sizes(load_config(arguments, arguments), values["trust_remote_code"])
    except Refusal:  # preflight refuses the model itself
        return None
    return None if sizes is None else math.ceil(max(sizes) / world_size)
