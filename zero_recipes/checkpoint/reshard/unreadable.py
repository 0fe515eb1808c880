"""DeepSpeed checkpoints whose states cannot be read by parameter, each with the reason; paths are relative to
deepspeed/runtime of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_recipes.config.ds_view import DsConfig
from zero_recipes.core.errors import Refusal


def refuse_unreadable(checkpoint: Path, folder: Path, model: dict[str, Any]) -> None:
    """`folder` holds each rank's states, `model` is what rank 0's *_model_states.pt says. Raises Refusal."""
    config = model["ds_config"]
    zero = config.get("zero_optimization", {})
    if zero.get("stage", 0) == 0:
        raise Refusal(
            "ZR731",
            f"{checkpoint} is of ZeRO stage 0",
            "Its optimizer states are numbered, not named (runtime/engine.py, _common_checkpoint_state writes "
            "param_shapes from stage 1 on): they cannot be given to parameters with certainty.",
            "Go on at stage 0 with --resume_from_checkpoint, or run from the start at the stage you want.",
        )
    if model["mp_world_size"] != 1 or any(folder.glob("*mp_rank_01*")) or "num_experts" in model:
        raise Refusal(
            "ZR732",
            f"{checkpoint} is of a model-parallel or mixture-of-experts run",
            "Each rank holds other weights, not parts of the same: cutting by parameter would mix them.",
            "Convert it with DeepSpeed's own ds_to_universal.",
        )
    if config.get("fp16", {}).get("enabled"):
        raise Refusal(
            "ZR733",
            f"{checkpoint} is of an fp16 run",
            "Its loss scale would restart, and the first steps would be skipped or overflow.",
            "Reshard runs in bf16 or fp32.",
        )
    if DsConfig(config).bf16_masters and not DsConfig(config).bf16_states:
        raise Refusal(
            "ZR288",
            f"{checkpoint} was written with bf16_master_weights_and_grads and states in fp32",
            "Only an offloaded optimizer keeps them so, and DeepSpeed gathers such states in bf16 at stage 3 "
            "(runtime/zero/stage3.py, _fp32_state_allgather): whether they go on bit for bit was never compared.",
            "Go on with --resume_from_checkpoint on as many processes, at the same stage: that is exact.",
        )
    if zero.get("mics_shard_size", -1) > 0:
        raise Refusal(
            "ZR734",
            f"{checkpoint} was written with mics_shard_size",
            "Its groups of ranks hold the same parts several times, in an order that is not read here.",
            "Run without it.",
        )
    if any((zero.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param")):
        raise Refusal(
            "ZR735",
            f"{checkpoint} was written with states on NVMe",
            "DeepSpeed leaves them there and writes none into the checkpoint (runtime/engine.py, load_checkpoint).",
            'Offload to the CPU ("device": "cpu") in runs that are to be resumed.',
        )
