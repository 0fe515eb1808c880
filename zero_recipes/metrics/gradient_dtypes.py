"""In which precision a step's gradients are added up over its micro batches and reduced over the ranks."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from zero_recipes.metrics.parts import GradientDtypes

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def gradient_dtypes(trainer) -> GradientDtypes | None:
    """Read off the engine, once there is one; None where it is another precision than these three.

    DeepSpeed 0.19.8, runtime/engine.py: `get_data_types` (data_types.grad_accum_dtype, else the model's) and
    `communication_data_type`; torch_autocast.py gives each its own. FSDP2 (torch,
    _fsdp_param.py `to_accumulated_grad_if_needed`) adds up what is not yet reduced in its reduce_dtype. DDP adds up
    and reduces the gradients of fp32 weights, whatever autocast computes in.
    """
    model = trainer.model_wrapped
    if hasattr(model, "get_data_types"):
        dtypes = model.get_data_types()[1], model.communication_data_type
    else:
        weights = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
        policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy if isinstance(model, FSDPModule) else None
        dtypes = ((policy.reduce_dtype if policy else None) or weights,) * 2
    if hasattr(model, "torch_autocast_enabled") and model.torch_autocast_enabled() and model.zero_optimization():
        return GradientDtypes(added_up=NAMES[dtypes[0]], reduced="bf16 and fp32")
    if not set(dtypes) <= set(NAMES):
        return None
    return GradientDtypes(added_up=NAMES[dtypes[0]], reduced=NAMES[dtypes[1]])
