"""One run, put together from recipe, command line and launcher: made once, read by everything that follows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_recipes.config.accelerate import hand_over
from zero_recipes.config.recipe import Recipe, TrlArguments, trl_arguments
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import refusal
from zero_recipes.core.process import local_world_size


@dataclass(frozen=True)
class RunConfig:
    """What one run does, ready to start: nothing that could refuse it cheaply has."""

    recipe: Recipe  # as written
    settings: Settings  # every key in force: the recipe's, the command line's, what launcher and machine decide
    given: Mapping[str, Any]  # keys that were named, and those that were derived: a recipe that runs again
    strategy: Strategy
    device: str  # "cpu" or "cuda"
    output_dir: Path

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32", in which it computes; torch_autocast keeps the weights in fp32."""
        return self.strategy.autocast or self.settings.precision

    @property
    def checkpoint(self) -> str | None:
        """The folder to go on from."""
        return self.settings.resume_from_checkpoint

    def trl_arguments(self) -> TrlArguments:
        """Starts the device's state: a process group that is needed exists before."""
        if self.strategy.is_deepspeed:
            hand_over(os.environ)
        return trl_arguments(self.settings, self.recipe.path)


def choose_device(use_cpu: bool) -> str:
    """ "cpu" or "cuda": the CPU where the recipe says so or no accelerator is found.

    A GPU that is there and that torch cannot use is refused by checks.machine.
    """
    import torch

    if use_cpu or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        return "cpu"
    return "cuda"


def settings_in_force(
    recipe: Recipe, strategy: Strategy | None, device: str, accumulation: int | None
) -> tuple[Settings, dict]:
    """(settings, given) of a run: what strategy, device and global batch decide, laid over the recipe."""
    decided: dict[str, Any] = {"output_dir": str(output_dir_of(recipe))}
    if device == "cpu":
        decided["use_cpu"] = True
    if accumulation is not None:
        decided["gradient_accumulation_steps"] = accumulation
    if strategy is not None and strategy.is_fsdp:
        decided |= {"fsdp": True, "fsdp_config": strategy.fsdp_config}
    if strategy is not None and strategy.is_deepspeed:
        decided["deepspeed"] = strategy.ds_config.raw
    without = {} if "fsdp" in decided or strategy is None else {"fsdp": None}  # false and empty lists mean the same
    return recipe.settings.replace(**(without | decided)), {**recipe.given, **decided}


def output_dir_of(recipe: Recipe) -> Path:
    """The recipe's output_dir, or output/<recipe>: TRL would write into `trainer_output` for every recipe."""
    return Path(recipe.settings.output_dir or f"output/{recipe.name}")


def refuse_uneven_gpus(strategy: Strategy, device: str, environment: Mapping[str, str]) -> None:
    """One plain process with several GPUs would become nn.DataParallel, which SFTTrainer does not take; more processes
    than GPUs on a machine end in NCCL, which does not take two ranks on one device."""
    import torch

    here = local_world_size(environment, strategy.world_size)
    count = torch.cuda.device_count() if device == "cuda" else here
    if strategy.world_size == 1 and "RANK" not in environment and count > 1:
        raise refusal("ZR308", count=count)
    if here > count:
        raise refusal("ZR309", here=here, count=count)
