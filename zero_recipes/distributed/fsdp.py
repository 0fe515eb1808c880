"""PyTorch's FSDP2 (`fully_shard`) under the same recipe: its mixed precision, and that it really shards.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from zero_recipes.core.findings import refusal


def policy(training_args) -> MixedPrecisionPolicy:
    """Computes and reduces in 16 bit, as accelerate's own does, and returns what the model returns.

    accelerate 1.15, utils/dataclasses.py (set_mixed_precision) also casts what the model returns to 16 bit: the loss,
    which TRL computes inside the model, is rounded to three digits in training, evaluation and metrics.json.
    """
    dtype = torch.bfloat16 if training_args.bf16 else torch.float16
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)


class RefuseUnsharded(TrainerCallback):
    """Refuses a run that was to shard by FSDP2 and does not, before its first step."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if isinstance(model, FSDPModule) and not whole:
            return
        named = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
        raise refusal("ZR323", named=named or "the model is not wrapped", name=type(model).__name__)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank: all of it, unless FSDP2 shards it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard_model(model: torch.nn.Module) -> None:
    """Let go of what a forward pass without a backward pass has left gathered: the root and the LM head.

    torch (fsdp/_fully_shard/_fully_shard.py) reshards these after the backward pass only. Nothing happens to a model
    without FSDP2.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
