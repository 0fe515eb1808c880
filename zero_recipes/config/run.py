"""One run: what recipe, command line, launcher and machine decide together (checks/resolve.py)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from zero_recipes.config.accelerate import DS_FIELDS, ds_config_file
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings, computed_in, loaded_dtype
from zero_recipes.config.strategy import Strategy
from zero_recipes.config.trl_arguments import TrlArguments, trl_arguments
from zero_recipes.core.findings import refusal
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.process import local_world_size

UNDECIDED = "undecided"  # the name of a strategy that could not be resolved


@dataclass(frozen=True, eq=False)
class Run:
    """One run, decided: what recipe, command line, launcher and machine say together.

    Nothing writes into it; `resuming_from` makes another.

    Args:
        recipe: as it is written.
        settings: the value of every key in force: the recipe's, the command line's, what launcher and machine decide.
        explicit: keys that were named, and those that were derived: a recipe that runs again.
        strategy: how the work is shared among the processes.
        device: "cpu" or "cuda".
        environment: the launcher's variables.
        meta: the model without weights (model/meta.py); None where its configuration is not at hand.
        starts_now: False where the run is only looked at (zero-recipes check).
        gpu: the cards of another machine on which it would start; None for this one.
    """

    recipe: Recipe
    settings: Settings
    explicit: Mapping[str, Any]
    strategy: Strategy
    device: str
    environment: Mapping[str, str]
    meta: Any = None
    starts_now: bool = True
    gpu: Gpu | None = None

    @property
    def is_decided(self) -> bool:
        """False where no strategy could be resolved, which refuses the run."""
        return self.strategy.name != UNDECIDED

    @property
    def config(self) -> Any:
        """The model's configuration; None where it is not at hand."""
        return None if self.meta is None else self.meta.config

    @property
    def output_dir(self) -> Path:
        """The folder that the run writes into."""
        return Path(self.settings.output_dir)

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint folder to go on from; None for a run from the start."""
        return self.settings.resume_from_checkpoint

    def resuming_from(self, checkpoint: str | None) -> Self:
        """The same run, going on from another checkpoint; None: from the start."""
        return replace(self, settings=self.settings.replace(resume_from_checkpoint=checkpoint))

    @property
    def precision(self) -> str:
        """The precision in which it computes, "bf16", "fp16" or "fp32"; torch_autocast keeps the weights in fp32."""
        precision = self.strategy.ds.autocast or self.settings.precision
        if self.stage == 3:  # zero.Init makes the weights of an engine without 16 bits fp32
            return precision
        return computed_in(precision, loaded_dtype(self.settings, getattr(self.config, "dtype", None)))

    @property
    def saves_on_signals(self) -> bool:
        """Whether a signal saves a checkpoint: not where nothing could go on from it (ZR719, ZR254)."""
        return self.settings.save_on_signal and not self.strategy.ds.on_nvme and self.strategy.sequence_parallel == 1

    @property
    def ds(self) -> DsConfig:
        """The DeepSpeed configuration; an empty one without DeepSpeed."""
        return self.strategy.ds

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None without DeepSpeed."""
        return self.strategy.zero_stage

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    @property
    def ranks_per_node(self) -> int:
        """The number of processes on this machine."""
        return local_world_size(self.environment, self.world_size)

    def value(self, path: str) -> Any:
        """Look up a value of the DeepSpeed configuration, as "zero_optimization.stage"; None where it is missing."""
        block: Any = self.ds.raw
        for key in path.split("."):
            block = block.get(key) if isinstance(block, Mapping) else None
        return block

    def trl_arguments(self) -> TrlArguments:
        """Make TRL's own objects of the settings in force. Raises Refusal.

        This starts the device's state: a process group that is needed exists before.
        """
        if self.strategy.is_deepspeed and ds_config_file(self.environment) is None:
            # inline_ds_config has read them; DeepSpeedPlugin (accelerate 1.15, utils/dataclasses.py) stops at both
            os.environ.pop(DS_FIELDS, None)
        return trl_arguments(self.settings, self.recipe.path)


def choose_device(use_cpu: bool) -> str:
    """Choose the device that trains, "cpu" or "cuda", and tell DeepSpeed.

    DeepSpeed, which is imported later, would choose by the packages that are installed.
    """
    import torch

    if use_cpu or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        return "cpu"
    return "cuda"


def settings_in_force(
    recipe: Recipe, strategy: Strategy, device: str, accumulation: int | None
) -> tuple[Settings, Mapping[str, Any]]:
    """Lay what launcher and machine decide over the recipe's keys.

    Args:
        device: "cpu" or "cuda".
        accumulation: gradient_accumulation_steps where it is derived, else None.

    Returns (every key in force, those that are named or derived).
    """
    decided: dict[str, Any] = {"output_dir": str(recipe.output_dir)}
    if device == "cpu":
        decided["use_cpu"] = True
    if accumulation is not None:
        decided["gradient_accumulation_steps"] = accumulation
    if strategy.is_fsdp:
        decided["fsdp"] = True
        decided["fsdp_config"] = strategy.fsdp_config
    if strategy.is_deepspeed:
        decided["deepspeed"] = strategy.ds_config.raw
    settings = recipe.settings.replace(**decided)
    if not strategy.is_fsdp and strategy.name != UNDECIDED:
        settings = settings.replace(fsdp=None)  # false and empty lists mean the same
    return settings, MappingProxyType({**recipe.explicit, **decided})


def refuse_uneven_gpus(strategy: Strategy, device: str, environment: Mapping[str, str]) -> None:
    """Refuse a number of GPUs that does not fit the number of processes.

    One process with several GPUs would become nn.DataParallel, under torchrun too (engine/group.py), which SFTTrainer
    refuses once the weights are loaded; DeepSpeed's does not. NCCL takes no two ranks on one device.
    """
    import torch

    here = local_world_size(environment, strategy.world_size)
    count = torch.cuda.device_count() if device == "cuda" else here
    if strategy.world_size == 1 and count > 1 and not ("RANK" in environment and strategy.is_deepspeed):
        raise refusal("ZR308", count=count)
    if here > count:
        raise refusal("ZR309", here=here, count=count)
