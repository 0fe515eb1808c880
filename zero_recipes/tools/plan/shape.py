"""The numbers of a model that formulas need, from its config.json alone: built without memory once, then from disk."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks import capacity
from zero_recipes.config.recipe import Settings
from zero_recipes.core.findings import library_error_as_finding
from zero_recipes.metrics.flops import ModelFlops, active_experts, model_flops
from zero_recipes.tools.plan.cache import cached

LORA_KEYS = ("use_peft", "use_rslora", "use_dora", "peft_config")  # beside lora_*


def shape_of(config: Mapping[str, Any], settings: Settings) -> "Shape":
    """Raises Refusal where the model's class cannot be built from the config alone."""
    lora = {key: value for key, value in vars(settings).items() if key.startswith("lora_") or key in LORA_KEYS}
    return _shape(json.dumps(dict(config), sort_keys=True), json.dumps(lora, sort_keys=True, default=str))


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that formulas need, LoRA's adapter included. Counts are elements; widths are elements per
    token."""

    tensors: Sequence[capacity.SwapTensor]
    parameters: int
    trainable: int
    multiplied: int  # those in matrix products: all but the embedding's rows
    adapted: float  # inputs of one layer's adapters
    layers: int
    hidden: int
    heads: int
    query_width: int
    kv_width: int  # of one
    ffn: int  # of experts: those that a token goes to together
    gated: bool  # SwiGLU and the like
    embedding: int  # and the head's weight: the largest tensor
    positions: int
    dtype: str  # of the weights' file
    flops: ModelFlops


@lru_cache(maxsize=64)
def _shape(config_json: str, lora_json: str) -> Shape:
    """From disk where possible, because building a model imports torch, transformers and PEFT."""
    found = cached(lambda: of_model(json.loads(config_json), json.loads(lora_json)), config_json, lora_json)
    weights, trained, attention = found["flops"]
    tensors = [capacity.SwapTensor(*tensor) for tensor in found["tensors"]]
    return Shape(**found | {"tensors": tensors, "flops": ModelFlops(weights, trained, dict(attention))})


def of_model(raw: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Shape as JSON can hold them, from the model built without memory."""
    from peft import get_peft_model
    from transformers import AutoConfig

    from zero_recipes.model import adapter_config, build_on_meta

    with library_error_as_finding(f"building a model of the type {raw.get('model_type')} from its config alone"):
        config = AutoConfig.for_model(**raw)
        model = build_on_meta(config)
        names = [name for name, _ in model.named_parameters()]
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        peft_config = adapter_config(Settings(dict(lora)))
        model = model if peft_config is None else get_peft_model(model, peft_config)
    text, found = config.get_text_config(), SimpleNamespace()
    found.tensors = [capacity.SwapTensor(p.numel(), p.ndim > 1, p.requires_grad) for p in model.parameters()]
    found.parameters = sum(tensor.size for tensor in found.tensors)
    found.trainable = sum(tensor.size for tensor in found.tensors if tensor.trained)
    found.multiplied = found.parameters if tied else found.parameters - embedding.numel()
    adapted = sum(p.shape[-1] for name, p in model.named_parameters() if "lora_A" in name)
    found.adapted = adapted / text.num_hidden_layers
    found.layers, found.hidden = text.num_hidden_layers, text.hidden_size
    found.heads = getattr(text, "num_attention_heads", None) or 1  # Mamba has none
    head_width = getattr(text, "head_dim", None) or found.hidden // found.heads
    found.query_width = found.heads * head_width
    found.kv_width = (getattr(text, "num_key_value_heads", None) or found.heads) * head_width
    found.ffn = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * found.hidden
    experts, active = active_experts(text)
    if experts:
        found.ffn = active * (getattr(text, "moe_intermediate_size", None) or found.ffn)
    found.gated = any("gate_proj" in name or "gate_up_proj" in name for name in names)
    found.embedding = text.vocab_size * found.hidden
    found.positions = getattr(text, "max_position_embeddings", 0)
    found.dtype = str(config.dtype or "float32").removeprefix("torch.")
    flops = model_flops(model)
    found.flops = flops.weights, flops.trained, [*flops.attention.items()]  # JSON has no key that is None
    return vars(found)
