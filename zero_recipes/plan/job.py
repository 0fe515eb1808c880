"""What is asked of a prediction, and what comes back: the two shapes that the rooms of this folder share."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

# Keys of a recipe that no prediction depends on.
NOT_ASKED = {"output_dir", "run_name", "overwrite", "predict", "skip_plan", "resume_from_checkpoint", "save_model"}
NOT_ASKED |= {"max_steps", "num_train_epochs", "learning_rate", "warmup_steps", "seed", "data_seed", "allow_keys"}
NOT_ASKED |= {"dataset_name", "sample_prompts", "sample_max_new_tokens", "logging_steps", "save_steps", "eval_steps"}

PARTS = ("params", "grads", "optimizer", "activations", "buckets", "loss_head", "other")


@dataclass(frozen=True)
class Job:
    """One recipe under one strategy on a number of GPUs. Nothing in it needs weights, data or a network."""

    model: str  # as the recipe names it
    config: dict[str, Any]  # the model's config.json
    values: dict[str, Any]  # the recipe's values with overrides: TRL's keys and ours
    strategy: str  # a name of accelerate_configs/, or "single"
    ds_config: dict[str, Any] | None  # as in ds_configs/, "auto" values included; None without DeepSpeed
    world_size: int
    gpus_per_node: int
    device: str = "gpu"  # "cpu": as CPU processes over gloo hold it, to compare with a run on them

    @property
    def zero_stage(self) -> int | None:
        """None without DeepSpeed."""
        return None if self.ds_config is None else self.ds_config.get("zero_optimization", {}).get("stage", 0)

    def key(self, versions: dict[str, str]) -> str:
        """Name of the cached answer: everything that it depends on."""
        asked = asdict(self)
        asked["values"] = {key: value for key, value in asked["values"].items() if key not in NOT_ASKED}
        return hashlib.sha256(json.dumps([asked, versions], sort_keys=True, default=str).encode()).hexdigest()


# A prediction is a dict that JSON can hold. Bytes are bytes, of the rank that needs most (0 or world_size - 1):
#
# source                        "engine" (simulated) or "formulas"
# strategy, zero_stage, world_size, parameters, trainable_parameters, precision,
# micro_batch_size, gradient_accumulation_steps, max_length
# allocated_peak_bytes          the largest sum of live tensors on the accelerator in a training step
# peak_phase, peak_operator     where it stands: "forward" | "backward" | "step", and the operator ("aten.mm"); or null
# at_peak                       {part: bytes} over PARTS; the sum is allocated_peak_bytes
# model_state_bytes             {"params", "grads", "optimizer", "offloaded_host", "offloaded_disk"}, as in metrics.json
# memory_phases                 {"model_loaded", "engine_built", "forward", "backward", "step"}: allocated after each
# reserved_bytes                {"low", "high"}: the caching allocator's segments, and with CUDA context and NCCL
# host_bytes                    {"load", "training"}: per node, all its ranks together
# checkpoint_bytes              {"weights", "resumable"}: on disk, all ranks together
# communication_bytes_per_step  {collective: bytes of full tensors}, as in metrics.json
# flops_per_step                of one rank, matrix products and attention of forward and backward, recomputation too
# seconds                       how long the prediction took
# resident_bytes                how much memory the simulation of a rank took; only from the engine
# notes                         [str]: what it does not know about this job
Prediction = dict[str, Any]
