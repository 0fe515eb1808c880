"""A resumed QLoRA run computes its adapter in fp32, and its losses differ from those of the uninterrupted run.

TRL makes QLoRA's adapter bf16 (sft_trainer.py, `if _is_quantized_model`). The Trainer resumes by PEFT's load_adapter,
which makes it fp32 again.

Library: transformers 5.23, trainer.py (`_load_from_checkpoint`); PEFT 0.21, peft_model.py (`load_adapter`).
Upstream: huggingface/peft#2421.
Here: what trains keeps its dtype while a checkpoint is loaded.

See it: one CPU

    import tempfile

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), LoraConfig())
    model.bfloat16().save_pretrained(folder := tempfile.mkdtemp())
    model.load_adapter(folder, "default", is_trainable=True)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32}, dtypes
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def adapter_dtypes_kept(model: torch.nn.Module) -> Iterator[None]:
    """At its end the parameters that train have the dtypes from before again."""
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, p in model.named_parameters():
        if name in dtypes:
            p.data = p.data.to(dtypes[name])
