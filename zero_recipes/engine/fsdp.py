"""What PyTorch's FSDP2 (`fully_shard`) has sharded.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from zero_recipes.engine.faults.fsdp_head_of_an_adapter import norm_of_decoder


def has_final_norm(model: PreTrainedModel) -> bool:
    """Whether a run finds the norm that the LM head is gathered with. `model`: without an adapter.

    Private: `_find_final_norm` (accelerate 1.15, utils/fsdp_utils.py).
    """
    from accelerate.utils import fsdp_utils

    return (fsdp_utils._find_final_norm(model) or norm_of_decoder(model)) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; all of it unless FSDP2 shards it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard_model(model: torch.nn.Module) -> None:
    """Free what the root and the LM head have gathered.

    FSDP2 reshards them only after a backward pass (torch, fsdp/_fully_shard/_fully_shard.py).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield unsharded gradients that FSDP2 keeps between micro steps.

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
