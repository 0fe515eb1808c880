"""One run, put together from recipe and launcher: its strategy, device and output folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_recipes.config.recipe import Recipe
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.errors import Refusal
from zero_recipes.core.process import local_world_size


@dataclass(frozen=True)
class Run:
    """One run, ready to start: nothing that could refuse it cheaply has."""

    recipe: Recipe
    strategy: Strategy
    device: str  # "cpu" or "cuda"
    output_dir: Path


def choose_device(recipe: Recipe) -> str:
    """ "cpu" or "cuda": `use_cpu` is taken from the recipe, and found where there is no accelerator."""
    if not torch.cuda.is_available():
        recipe.values["use_cpu"] = recipe.given["use_cpu"] = True
    if recipe.values["use_cpu"]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return "cpu"
    return "cuda"


def refuse_data_parallel(strategy: Strategy, device: str, environment: Mapping[str, str]) -> None:
    """One plain process with several GPUs would become nn.DataParallel, which SFTTrainer does not take."""
    count = torch.cuda.device_count() if device == "cuda" else 1
    if strategy.world_size == 1 and "RANK" not in environment and count > 1:
        raise Refusal(
            "ZR308",
            f"one process, but {count} GPUs are visible",
            "transformers would split batches with nn.DataParallel, which TRL's SFTTrainer refuses.",
            "accelerate launch --config_file accelerate_configs/zero2.yaml run_sft.py RECIPE.yaml, or make one GPU "
            "visible with CUDA_VISIBLE_DEVICES=0.",
        )


def refuse_shared_gpus(strategy: Strategy, device: str, environment: Mapping[str, str]) -> None:
    """More processes than GPUs on this machine: NCCL does not take two ranks on one device."""
    here = local_world_size(environment, strategy.world_size)
    count = torch.cuda.device_count() if device == "cuda" else here
    if here > count:
        raise Refusal(
            "ZR309",
            f"{here} processes on this machine, but {count} GPU{'s' if count > 1 else ''}",
            'NCCL (init.cc, "Duplicate GPU detected") stops two ranks on one device, after the model has been loaded.',
            f"--num_processes {count}, or use_cpu: true for a run on the CPU.",
        )


def choose_output_dir(recipe: Recipe) -> Path:
    """The recipe's output_dir, or output/<recipe>: TRL would write into `trainer_output` for every recipe."""
    if recipe.values.get("output_dir") is None:
        recipe.values["output_dir"] = recipe.given["output_dir"] = f"output/{recipe.name}"
    return Path(recipe.values["output_dir"])
