"""What is asked of a prediction: one recipe under one strategy on a number of GPUs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

# Keys of a recipe that no prediction depends on.
NOT_ASKED = {"output_dir", "run_name", "overwrite", "predict", "skip_plan", "resume_from_checkpoint", "save_model"}
NOT_ASKED |= {"max_steps", "num_train_epochs", "learning_rate", "warmup_steps", "seed", "data_seed", "allow_keys"}
NOT_ASKED |= {"dataset_name", "sample_prompts", "sample_max_new_tokens", "logging_steps", "save_steps", "eval_steps"}


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
