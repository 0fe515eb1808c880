"""Patches for faults of the libraries below that would change results; tests fail when one is no longer needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, TrainerCallback

from zero_recipes.compat.deepspeed_tensors import base_optimizer
from zero_recipes.compat.parts_of_deepspeed import FRESH_ADAM, QUANTIZED_GRADIENTS
from zero_recipes.compat.parts_of_torch import LAYOUT
from zero_recipes.config.strategy import Strategy


def patch_libraries(strategy: Strategy) -> None:
    """What must be in place before DeepSpeed builds its engine. Raises Refusal."""
    if strategy.is_deepspeed and strategy.ds_config.quantizes_gradients:
        patch_quantized_gradients()


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
        base = base_optimizer(inner)
        for counters in (*base.state.values(), *base.param_groups):  # FusedAdam counts in its groups, with integers
            if "step" in counters:
                counters["step"] = counters["step"] * 0
        FRESH_ADAM.of(inner, "refresh_fp32_params")()


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


def without_aliases(
    model: torch.nn.Module, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """A state dict of `model` that holds a tied weight once, under the name of the tensor that it is tied to.

    transformers 5.23, modeling_utils.py `remove_tied_weights_from_state_dict` knows tied weights by their memory; what
    DeepSpeed (stages 0 to 2: accelerate.get_state_dict copies) and FSDP2 gather are copies: a head that is the
    embedding is saved twice (hiyouga/LLaMA-Factory#10560). Weights that the model ties and that yet differ are kept.
    """
    if not state_dict or not isinstance(model, PreTrainedModel):
        return state_dict
    tied = model.all_tied_weights_keys.items()
    both = {alias: source for alias, source in tied if alias in state_dict and source in state_dict}
    twice = {alias for alias, source in both.items() if torch.equal(state_dict[alias], state_dict[source])}
    return {name: tensor for name, tensor in state_dict.items() if name not in twice}


@contextlib.contextmanager
def adapter_dtypes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Let what trains have the dtype after the loading of a checkpoint that it had before.

    TRL 1.16, sft_trainer.py (`if _is_quantized_model`) makes QLoRA's adapter bf16; transformers 5.23, trainer.py
    `_load_from_checkpoint` loads it by PEFT's load_adapter, which makes it fp32 again: a run resumed without DeepSpeed
    would go on in another precision.
    """
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, p in model.named_parameters():
        if name in dtypes and p.dtype != dtypes[name]:
            p.data = p.data.to(dtypes[name])


def patch_quantized_gradients() -> None:
    """ZeRO++'s qgZ: hand gradients to DeepSpeed's kernel as fp16, and make them their mean over all ranks.

    DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py `all_to_all_quant_reduce` gives gradients as they are to a
    kernel that reads fp16 whatever they are (ops/csrc/quantization/pt_binding.cpp, ds_swizzle_quant:
    `(__half*)input_vals.data_ptr()`): the bits of bf16 and fp32 become other numbers. The kernel adds up the devices of
    a node (quant_reduce.cu, `rop::Add`) and only the nodes are divided by, so that matrices' gradients are as many
    times the mean as a node has devices, while vectors, which go through reduce-scatter, are the mean. Called again, it
    does nothing more.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    QUANTIZED_GRADIENTS.require()
    faulty = stage3.all_to_all_quant_reduce
    if hasattr(faulty, "unpatched"):
        return

    def all_to_all_quant_reduce(tensors, groups):
        # what it does not quantize goes through reduce-scatter, as it is
        quantized = [t.dim() != 1 and t.numel() % (2 * comm.get_world_size()) == 0 for t in tensors]
        devices = get_accelerator().device_count()
        given = [t.div(devices).half() if q else t for t, q in zip(tensors, quantized, strict=True)]
        return [out.to(t.dtype) for out, t in zip(faulty(given, groups), tensors, strict=True)]

    all_to_all_quant_reduce.unpatched = faulty
    stage3.all_to_all_quant_reduce = all_to_all_quant_reduce


def keep_4bit_layout(model: torch.nn.Module) -> None:
    """Keep 4-bit layers in the layout that can be trained, on CPUs with AVX512-BF16 too.

    bitsandbytes 0.50.2, nn/modules.py (Linear4bit.forward) packs the weights anew in the first forward pass in
    evaluation mode there, in place and for good; autograd/_functions.py (matmul_4bit) then multiplies without autograd
    in training too. After samples or an evaluation no gradient would pass a frozen layer: the adapters below it
    would learn from the residual alone, with a warning of torch's and nothing else.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            LAYOUT.of(module, "support_avx512bf16_for_cpu")
            module.support_avx512bf16_for_cpu = False
