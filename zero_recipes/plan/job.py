"""What a prediction is made for: one recipe under one strategy on a number of GPUs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import Settings

FSDP = "fsdp2"  # the strategy that no ds_config describes

# Keys of a recipe that no prediction depends on.
NO_PART = {"output_dir", "run_name", "overwrite", "predict", "skip_plan", "resume_from_checkpoint", "save_model"}
NO_PART |= {"max_steps", "num_train_epochs", "learning_rate", "warmup_steps", "seed", "data_seed", "allow_keys"}
NO_PART |= {"dataset_name", "sample_prompts", "sample_max_new_tokens", "logging_steps", "save_steps", "eval_steps"}
NO_PART |= {"ignore"}


@dataclass(frozen=True)
class Job:
    """One recipe under one strategy on a number of GPUs. Nothing in it needs weights, data or a network."""

    model: str  # as the recipe names it
    config: dict[str, Any]  # the model's config.json
    settings: Settings  # the recipe's settings with overrides: TRL's keys and ours
    strategy: str  # a name of accelerate_configs/, or "single"
    ds_config: dict[str, Any] | None  # as in ds_configs/, "auto" values included; None without DeepSpeed
    world_size: int
    gpus_per_node: int
    device: str = "gpu"  # "cpu": as CPU processes over gloo hold it, to compare with a run on them

    @property
    def zero_stage(self) -> int | None:
        """None without DeepSpeed."""
        return None if self.ds_config is None else self.zero.stage

    @property
    def zero(self) -> DsConfig:
        """The DeepSpeed configuration by its meaning; that of an empty one without DeepSpeed."""
        return DsConfig(self.ds_config or {})

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32", in which it computes; torch_autocast keeps the weights in fp32."""
        return self.zero.autocast or self.settings.precision

    @property
    def is_fsdp(self) -> bool:
        return self.ds_config is None and self.strategy.startswith(FSDP)

    @property
    def is_alone(self) -> bool:
        """One process without a process group: nothing is wrapped, neither by DeepSpeed nor by DDP or FSDP2."""
        return self.world_size == 1 and self.ds_config is None and not self.is_fsdp

    @property
    def on_nvme(self) -> bool:
        """Whether the optimizer's states or the parameters lie on NVMe."""
        return bool(self.zero.on_nvme)

    @property
    def offloads_params(self) -> bool:
        """Below stage 3 DeepSpeed keeps them on the GPU, whatever offload_param says."""
        return self.zero_stage == 3 and self.zero.offload_param is not None

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus_per_node, self.world_size)

    @property
    def sequence_parallel(self) -> int:
        """Ranks that share one sequence."""
        return self.settings.sequence_parallel_size or 1

    @property
    def quantizes(self) -> bool:
        """Whether bitsandbytes packs the weights."""
        return bool(self.settings.load_in_4bit or self.settings.load_in_8bit)

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed, under TRL's new name or transformers' old one."""
        new = self.settings.activation_checkpointing
        return bool(self.settings.gradient_checkpointing if new is None else new)

    def changed(self, **values: Any) -> Job:
        """With other values of the recipe's keys."""
        return replace(self, settings=self.settings.replace(**values))

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_dict` reads it."""
        return vars(self) | {"settings": self.settings.as_dict()}

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> Job:
        return cls(**(written | {"settings": Settings(written["settings"])}))

    def key(self, versions: dict[str, str]) -> str:
        """Name of the cached answer: everything that it depends on."""
        dependencies = self.as_dict()
        settings = dependencies.pop("settings")
        dependencies["settings"] = {key: settings[key] for key in settings if key not in NO_PART}
        return hashlib.sha256(json.dumps([dependencies, versions], sort_keys=True, default=str).encode()).hexdigest()
