"""fp32 master weights begin with the values of the loaded weights, not with those of their 16-bit copies.

Where they begin with the copies, most of an optimizer step of 1e-5 is lost in the next forward pass: the masters lie on
the grid of bf16, and an update smaller than half of its spacing changes no copy until several have added up.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.tiny import arguments, write_model, write_recipe

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
STEPS = 10
TOLERANCE = 2e-3  # of the loss


def write_masters_recipe(folder: Path, dtype: torch.dtype | None, sizes: dict[str, int], **keys) -> Path:
    """Ten steps at a learning rate of 1e-5 on a GPT-NeoX: a checkpoint of that dtype, or (None) random weights."""
    keys = {"learning_rate": 1.0e-5, "lr_scheduler_type": "constant", "max_steps": STEPS} | keys
    recipe = write_recipe(folder, random_weights=dtype is None, **keys)
    write_model(folder / "model", **sizes)
    if dtype is not None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
        model.to(dtype).save_pretrained(folder / "model")
    return recipe


def losses_of(group, recipe: Path, strategy: str, out: Path, *more: str) -> list[float]:
    argv = arguments(recipe, strategy, out, *more)
    return group.run("train", argv=argv)[0]["metrics"]["loss_history"]
