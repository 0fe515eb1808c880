"""PyTorch's FSDP2 (`fully_shard`) under the same recipe.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from zero_recipes.core.process import rank
from zero_recipes.core.run_end import PeerFailed


def fix_arguments(training_args, device: str) -> None:
    """Set what would change a run's results, before there is a trainer.

    accelerate's mixed precision (utils/dataclasses.py, set_mixed_precision) also casts what the model returns:
    the loss, which TRL computes inside, is rounded to three digits.
    `fsdp_config` takes no other.

    Private: `fsdp_plugin_args` of TrainingArguments (transformers 5.23, training_args.py).
    """
    if device == "cpu":
        shard_on_cpu()
    if training_args.bf16 or training_args.fp16:
        dtype = torch.bfloat16 if training_args.bf16 else torch.float16
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        training_args.fsdp_plugin_args["mixed_precision_policy"] = policy


def shard_on_cpu() -> None:
    """Make accelerate shard in a CPU run.

    Private: the `distributed_type` of PartialState (accelerate 1.15).
    state.py (AcceleratorState.__init__) looks for FSDP only where the type is on a list without MULTI_CPU:
    with `use_cpu` every rank silently trains under plain DistributedDataParallel.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def keep_names_of_the_file(model: PreTrainedModel) -> None:
    """Let a model be saved under the names that its class has in files. Call it before sharding.

    Private: `_weight_conversions` and transformers.conversion_mapping (transformers 5.23).
    For a model built from its config, core_model_loading.py (revert_weight_conversion) finds renamings by its class's
    name. torch's fully_shard puts "FSDP" before that: GPTNeoX would be saved with lm_head.
    """
    from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is not None:
        return  # a model that is read from a file has them
    changes = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [change for change in changes if not isinstance(change, PrefixChange)]
    model._weight_conversions = renamings or None


@contextlib.contextmanager
def failures_raised() -> Iterator[None]:
    """What a rank failed of in a save or load of shards is raised there; the others raise PeerFailed.

    torch's CheckpointException (2.13, distributed/checkpoint/api.py), which holds all ranks' failures with their
    tracebacks, is a BaseException: no `except Exception` would record it.
    """
    try:
        yield
    except CheckpointException as raised:
        first = min(raised.failures)
        error, _ = raised.failures[first]
        if first == rank():
            raise error from None
        raise PeerFailed(f"rank {first} failed: {type(error).__name__}: {error}") from None


def has_final_norm(model: PreTrainedModel) -> bool:
    """Whether accelerate finds the norm that the LM head is gathered with. `model`: without an adapter.

    Private: `_find_final_norm` (accelerate 1.15, utils/fsdp_utils.py).
    """
    from accelerate.utils import fsdp_utils

    return fsdp_utils._find_final_norm(model) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; all of it unless FSDP2 shards it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard_model(model: torch.nn.Module) -> None:
    """Free the root and the LM head.

    FSDP2 reshards them only after a backward pass (torch, fsdp/_fully_shard/_fully_shard.py).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Unsharded gradients that FSDP2 keeps between micro steps.

    Private: FSDPState and FSDPParam (torch 2.13, fsdp/_fully_shard/_fsdp_param.py).
    accelerate (accelerator.py, no_sync) delays the reduction to the last one.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                yield from _gradients_of(parameter)


def _gradients_of(parameter) -> Iterator[torch.Tensor]:
    if parameter.unsharded_accumulated_grad is not None:
        yield parameter.unsharded_accumulated_grad
    unsharded = getattr(parameter, "_unsharded_param", None)  # None before the first all-gather
    if unsharded is not None and unsharded.grad is not None:
        yield unsharded.grad
