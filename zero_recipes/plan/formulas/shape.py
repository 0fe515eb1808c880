"""The numbers of a model that formulas need: counted on the meta device from its config, never guessed from a name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zero_recipes.checks.lower_bounds import DTYPE_BYTES
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.plan.job import Job
from zero_recipes.theory.flops import ModelFlops, active_experts, idle_weights, model_flops
from zero_recipes.theory.lower_bounds import SwapTensor


@dataclass(frozen=True)
class Shape:
    """Counts are elements; widths are elements per token."""

    parameters: int  # LoRA's included
    trainable: int
    multiplied: int  # parameters that take part in matrix products: all but the embedding's rows
    idle: int  # of them, those of a mixture's experts that a token does not go to
    layers: int
    hidden: int
    heads: int
    query_width: int  # heads x head_dim
    kv_width: int  # key and value heads x head_dim, of one of the two
    ffn: int  # of a mixture of experts, of all those that a token goes to
    gated: bool  # the MLP multiplies two projections (SwiGLU and the like)
    vocabulary: int
    positions: int
    dtype: str  # of the weights' file
    flops: ModelFlops
    tensors: tuple[SwapTensor, ...]


def shape_of(config: Mapping[str, Any], settings: Settings) -> Shape:
    """Build the model's class on the meta device, with LoRA's adapter where the recipe asks for one, and count.

    Raises Refusal where the class cannot be built from the config alone.
    """
    from trl import ModelConfig

    names = {field.name for field in dataclasses.fields(ModelConfig) if field.init}
    values = settings.as_dict()
    model_keys = {key: values[key] for key in sorted(names & values.keys()) if key.startswith(("lora_", "use_"))}
    return _counted(json.dumps(dict(config), sort_keys=True), json.dumps(model_keys, sort_keys=True, default=str))


@lru_cache(maxsize=64)
def _counted(config_json: str, model_keys_json: str) -> Shape:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import ModelConfig, get_peft_config

    from zero_recipes.libs.huggingface import without_deepspeed_announcement

    raw = json.loads(config_json)
    try:
        config = AutoConfig.for_model(**raw)
        with without_deepspeed_announcement(), torch.device("meta"):  # in a run one rank alone counts
            model = AutoModelForCausalLM.from_config(config)
            names = [name for name, _ in model.named_parameters()]
            embedding = model.get_input_embeddings().weight.numel()
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            peft_config = get_peft_config(ModelConfig(**json.loads(model_keys_json)))
            if peft_config is not None:
                from peft import get_peft_model

                model = get_peft_model(model, peft_config)
    except Exception as error:  # a model's class may raise anything
        raise refusal("ZR817", model_type=raw.get("model_type"), error=first_line(error)) from error
    text = config.get_text_config()
    parameters = sum(p.numel() for p in model.parameters())
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        parameters=parameters,
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        multiplied=parameters if tied else parameters - embedding,
        idle=idle_weights(model),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        query_width=heads * head_width,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_width,
        ffn=_mlp_width(text),
        gated=any("gate_proj" in name or "gate_up_proj" in name for name in names),
        vocabulary=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", 0),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        flops=model_flops(model),
        tensors=tuple(SwapTensor(p.numel(), p.ndim > 1, p.requires_grad) for p in model.parameters()),
    )


def _mlp_width(config) -> int:
    """Of the MLP that one token passes: of a mixture of experts, of all that it goes to together."""
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    experts, active = active_experts(config)
    if not experts:
        return dense
    each = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return active * each + (shared or (getattr(config, "n_shared_experts", None) or 0) * each)


def layer_bytes(shape: Shape, width: int, tokens: int, pairs: int) -> float:
    """One layer's activations (section 4.1: 34sbh + 5as²b, less dropout's masks, 2sbh and as²b).

    `pairs`: a·s²·b, where the scores are kept; 0 with fused attention, which keeps one fp32 sum per head and token.
    """
    attention = width * tokens * (shape.hidden + 2 * shape.query_width + 2 * shape.kv_width)
    scores = 2 * width * pairs if pairs else 4 * shape.heads * tokens
    mlp = width * tokens * (shape.hidden + (4 if shape.gated else 2) * shape.ffn)
    norms = 2 * width * tokens * shape.hidden
    return attention + scores + mlp + norms


def tokens_of(job: Job, shape: Shape) -> int:
    """The longest sequence: max_length, or where it is null the positions that the model has."""
    return job.settings.max_length or shape.positions


def batch_tokens(job: Job, shape: Shape) -> int:
    """Of one rank's micro batch."""
    return job.settings.per_device_train_batch_size * tokens_of(job, shape) // job.sequence_parallel


def computed_width(job: Job) -> int:
    """Bytes of an element that is computed with; without autocast and DeepSpeed the weights' own dtype decides."""
    if job.settings.precision != "fp32":
        return 2
    return 4 if job.ds_config is not None else DTYPE_BYTES.get(_requested(job, job.config.get("dtype")), 4)


def loaded_width(job: Job, shape: Shape) -> int:
    """Bytes per parameter of the dtype that the weights are loaded in."""
    return DTYPE_BYTES.get(_requested(job, shape.dtype), 4)


def _requested(job: Job, of_model: str | None) -> str:
    requested = (job.settings.model_init_kwargs or {}).get("dtype") or job.settings.dtype
    return str(of_model if requested in ("auto", None) else requested).removeprefix("torch.")
