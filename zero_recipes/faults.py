"""Faults of the libraries below that would change results, each mended here; tests fail when one is gone."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, TrainerCallback

from zero_recipes import model_states


class FreshAdamAtStage0(TrainerCallback):
    """Stage 0 in bf16 or fp16: undo the optimizer step that DeepSpeed takes before training.

    DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py `initialize_optimizer_states` (and fused_optimizer.py): to
    allocate Adam's states it calls `optimizer.step()` with zero gradients. Adam's step counter then starts at 1, so
    that its bias correction is off in every later step, and weight decay has shrunk the fp32 masters once. On a fresh
    start the counters go back to 0 and the masters are copied from the weights again; a resumed run is left alone,
    for its checkpoint has overwritten both.
    """

    def __init__(self, resumes: bool):
        self.resumes = resumes

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        inner = getattr(optimizer, "optimizer", None)
        if self.resumes or not isinstance(inner, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            return
        base = model_states.base_optimizer(inner)
        for counters in (*base.state.values(), *base.param_groups):  # FusedAdam counts in its groups, with integers
            if "step" in counters:
                counters["step"] = counters["step"] * 0
        inner.refresh_fp32_params()


def forget_trace_of_generation(engine) -> None:
    """ZeRO stage 3: drop the order of modules that DeepSpeed has recorded while the model generated.

    DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py prefetches parameters in the order of the last
    forward pass. Generation passes through the LM head's module, TRL's fused LM head (trl/trainer/utils.py
    `add_fused_lm_head`) gathers the head's weight itself: it finds it in flight and the first training step dies with
    "Cannot partition a param in flight". TRL does the same in models/utils.py `add_hooks`, behind a full gather.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is not None and not offload.param_coordinator.is_invalid_trace():
        offload.param_coordinator._invalidate_trace()


def load_weights_by_class(model: PreTrainedModel, checkpoint: str) -> None:
    """Put a checkpoint's weights into `model` as from_pretrained would, and all of them.

    transformers 5.23, trainer.py `_load_from_checkpoint` and `_load_best_model` call
    `load_state_dict(state_dict, False)` with the names of the file. Where saving renames (GPTNeoX: lm_head becomes
    embed_out), those weights are not loaded, with a warning only: a run resumed without DeepSpeed goes on with the LM
    head it began with, and a best model is saved with the last one's.
    """
    whole = type(model).from_pretrained(checkpoint, dtype=model.dtype, local_files_only=True)
    with torch.no_grad():
        model.load_state_dict(whole.state_dict())
