"""PyTorch's FSDP2 (`fully_shard`) under the same recipe: which configuration is in force, and that it really shards.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback

from zero_recipes.core.errors import Refusal


def mend(training_args, device: str) -> None:
    """Set right what would change a run's results. Call it once TrainingArguments exist and before the trainer does."""
    if device == "cpu":
        let_it_shard_on_cpu()
    if training_args.bf16 or training_args.fp16:
        training_args.fsdp_plugin_args["mixed_precision_policy"] = policy(training_args)


def policy(training_args) -> MixedPrecisionPolicy:
    """Computes and reduces in 16 bit, as accelerate's own does, and returns what the model returns.

    accelerate 1.15, utils/dataclasses.py (set_mixed_precision) also casts what the model returns to 16 bit: the loss,
    which TRL computes inside the model, is rounded to three digits in training, evaluation and metrics.json.
    """
    dtype = torch.bfloat16 if training_args.bf16 else torch.float16
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)


def keep_names_of_the_file(model: PreTrainedModel) -> None:
    """Let a model be saved under the names that its class has in files. Call it before the model is sharded.

    transformers 5.23, core_model_loading.py (revert_weight_conversion) finds the renamings of a model that was built
    from its config alone by the name of its class, and torch's fully_shard puts "FSDP" before that: GPTNeoX would be
    saved with lm_head instead of embed_out. A model read from a file remembers its renamings.
    """
    from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is None:
        found = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [change for change in found if not isinstance(change, PrefixChange)] or None


def let_it_shard_on_cpu() -> None:
    """Make accelerate shard in a CPU run.

    accelerate 1.15, state.py (AcceleratorState.__init__) looks for FSDP only where the distributed type is one of a
    list that MULTI_CPU is not on: with `use_cpu` every rank trains under plain DistributedDataParallel, silently.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class RefuseUnsharded(TrainerCallback):
    """Refuses a run that was to shard by FSDP2 and does not, before its first step."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if isinstance(model, FSDPModule) and not whole:
            return
        named = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
        raise Refusal(
            "ZR323",
            f"FSDP2 was requested and does not shard: {named or 'the model is not wrapped'}",
            f"The model is a {type(model).__name__}. accelerate (state.py, AcceleratorState.__init__) falls back to "
            "plain DistributedDataParallel where it does not know the device.",
            "Use accelerate_configs/zero3.yaml, and report this.",
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank: all of it, unless FSDP2 shards it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Unsharded gradients that FSDP2 keeps from one micro step to the next; nothing of a model without FSDP2.

    Under accumulation accelerate (accelerator.py, no_sync) puts the reduction off to the last micro step. No public
    name leads to them (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    computed = held._unsharded_param.grad if hasattr(held, "_unsharded_param") else None
                    yield from (grad for grad in (computed, held.unsharded_accumulated_grad) if grad is not None)


def reshard(model: torch.nn.Module) -> None:
    """Let go of what a forward pass without a backward pass has left gathered: the root and the LM head.

    torch (fsdp/_fully_shard/_fully_shard.py) reshards these after the backward pass only. Nothing happens to a model
    without FSDP2.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
