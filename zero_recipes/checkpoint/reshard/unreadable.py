"""DeepSpeed checkpoints whose states cannot be read by parameter, each with the reason; paths are relative to
deepspeed/runtime of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.findings import refusal


def refuse_unreadable(checkpoint: Path, folder: Path, model: dict[str, Any]) -> None:
    """`folder` holds each rank's states, `model` is what rank 0's *_model_states.pt says. Raises Refusal."""
    config = model["ds_config"]
    zero = config.get("zero_optimization", {})
    if zero.get("stage", 0) == 0:
        raise refusal("ZR731", checkpoint=checkpoint)
    if model["mp_world_size"] != 1 or any(folder.glob("*mp_rank_01*")) or "num_experts" in model:
        raise refusal("ZR732", checkpoint=checkpoint)
    if config.get("fp16", {}).get("enabled"):
        raise refusal("ZR733", checkpoint=checkpoint)
    if DsConfig(config).bf16_masters and not DsConfig(config).bf16_states:
        raise refusal("ZR288", checkpoint=checkpoint)
    if zero.get("mics_shard_size", -1) > 0:
        raise refusal("ZR734", checkpoint=checkpoint)
    if any((zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param")):
        raise refusal("ZR735", checkpoint=checkpoint)
