"""FSDP2 by way of private parts: what accelerate and transformers do otherwise, and the gradients that torch hides.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from zero_recipes.distributed import fsdp
from zero_recipes.libs import parts_of_accelerate, parts_of_huggingface, parts_of_torch


def fix_arguments(training_args, device: str) -> None:
    """Set right what would change a run's results. Call it once TrainingArguments exist and before the trainer does."""
    if device == "cpu":
        let_it_shard_on_cpu()
    if training_args.bf16 or training_args.fp16:
        parts_of_huggingface.FSDP_POLICY.require()
        training_args.fsdp_plugin_args["mixed_precision_policy"] = fsdp.policy(training_args)


def let_it_shard_on_cpu() -> None:
    """Make accelerate shard in a CPU run.

    accelerate 1.15, state.py (AcceleratorState.__init__) looks for FSDP only where the distributed type is one of a
    list that MULTI_CPU is not on: with `use_cpu` every rank trains under plain DistributedDataParallel, without a
    message.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    parts_of_accelerate.SHARDING_ON_CPU.require()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def keep_names_of_the_file(model: PreTrainedModel) -> None:
    """Let a model be saved under the names that its class has in files. Call it before the model is sharded.

    transformers 5.23, core_model_loading.py (revert_weight_conversion) finds the renamings of a model that was built
    from its config alone by the name of its class, and torch's fully_shard puts "FSDP" before that: GPTNeoX would be
    saved with lm_head instead of embed_out. A model read from a file remembers its renamings.
    """
    from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

    parts_of_huggingface.NAMES_OF_THE_FILE.require()
    if getattr(model, "_weight_conversions", None) is None:
        found = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [change for change in found if not isinstance(change, PrefixChange)] or None


def whole_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Unsharded gradients that FSDP2 keeps from one micro step to the next; nothing of a model without FSDP2.

    Under accumulation accelerate (accelerator.py, no_sync) puts the reduction off to the last micro step. No public
    name leads to them (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    of = parts_of_torch.WHOLE_GRADIENTS.of
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in of(of(module, "_get_fsdp_state")(), "_fsdp_param_groups"):
                for held in of(group, "fsdp_params"):
                    # before the first all-gather there is none
                    computed = held._unsharded_param.grad if hasattr(held, "_unsharded_param") else None
                    yield from (grad for grad in (computed, of(held, "unsharded_accumulated_grad")) if grad is not None)
