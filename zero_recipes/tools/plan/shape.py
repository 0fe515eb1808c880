"""The numbers of a model that formulas need, from its config.json: built without memory once, then from disk.

Those of the models and recipes that the package brings are in shapes.json (benchmarks/shapes.py writes it).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from zero_recipes.checks import capacity
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import raise_errors
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.measured_on import are_installed
from zero_recipes.metrics.flops import ModelFlops, active_experts, model_flops
from zero_recipes.model.layer_configs import configs_of_layers
from zero_recipes.tools.plan.cache import cached

# configurations' names of what drops a layer's outputs, once behind attention and once behind the MLP
RESIDUAL_DROPOUTS = ("dropout", "hidden_dropout", "resid_dropout", "resid_pdrop", "residual_dropout")
LORA_KEYS = ("use_peft", "use_rslora", "use_dora", "peft_config")  # beside lora_*
SHIPPED = Path(__file__).with_name("shapes.json")


def shape_of(config: Mapping[str, Any], settings: Settings) -> "Shape":
    """Read the shape of a model. Raises Refusal where its class cannot be built from the config alone."""
    return _shape(*as_json(config, settings))


def as_json(config: Mapping[str, Any], settings: Settings) -> tuple[str, str]:
    """All that a shape depends on: the model's configuration, and the recipe's keys of LoRA."""
    if not settings.use_peft:
        return json.dumps(dict(config), sort_keys=True), '{"use_peft": false}'
    lora = {key: value for key, value in vars(settings).items() if key.startswith("lora_") or key in LORA_KEYS}
    return json.dumps(dict(config), sort_keys=True), json.dumps(lora, sort_keys=True, default=str)


def name_of(config_json: str, lora_json: str) -> str:
    """The name of a shape in shapes.json."""
    return hashlib.sha256(f"{config_json}\n{lora_json}".encode()).hexdigest()[:16]


@cache
def shipped() -> dict[str, Any]:
    """{name: fields} of shapes.json. Empty where other versions of the libraries are installed, which build others."""
    document = json.loads(SHIPPED.read_text())
    return document["shapes"] if are_installed(document["versions"]) else {}


@dataclass(frozen=True)
class Shape:
    """The shape of a model, LoRA's adapter included. Counts are elements; widths are elements per token."""

    tensors: Sequence[capacity.SwapTensor]
    parameters: int
    trainable: int
    multiplied: int  # those in matrix products: all but the embedding's rows
    unreached: int  # those of a composite model that text never reaches: on each GPU, and never gathered
    packed: int  # those that bitsandbytes would pack
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
    drops_scores: bool  # whether training drops a share of attention's scores
    drops_residual: bool  # whether it drops a share of what layers add
    dtype: str  # of the weights' file
    flops: ModelFlops
    decoder_layers: Sequence[str]  # their classes

    @property
    def packed_share(self) -> float:
        """The share of the layers' weights that bitsandbytes packs, 0 to 1, as that of model/meta.py; of no adapter."""
        ends = self.parameters - self.multiplied + self.embedding
        return self.packed / (self.parameters - ends)


@lru_cache(maxsize=64)
def _shape(config_json: str, lora_json: str) -> Shape:
    """From disk where possible, because building a model imports torch, transformers and PEFT."""
    fields = shipped().get(name_of(config_json, lora_json))
    if fields is None:
        fields = cached(lambda: of_model(json.loads(config_json), json.loads(lora_json)), config_json, lora_json)
    tensors = []
    for *tensor, count in fields["tensors"]:
        tensors += [capacity.SwapTensor(*tensor)] * count
    fields = fields | {"tensors": tensors}
    weights, trained, attention = fields["flops"]
    fields["flops"] = ModelFlops(weights, trained, dict(attention))
    return Shape(**fields)


def of_model(raw: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Shape as JSON can hold them, from the model built without memory."""
    from peft import get_peft_model
    from transformers import AutoConfig

    from zero_recipes.checks.adapter_targets import refused_targets
    from zero_recipes.model.build import build_on_meta
    from zero_recipes.model.meta import decoder_layers, packed_elements
    from zero_recipes.model.towers import adapter_of, is_within, tower_names

    with library_error_as_finding(f"building a model of the type {raw.get('model_type')} from its config alone"):
        config = AutoConfig.for_model(**raw)
        model = build_on_meta(config)
        embedding = model.get_input_embeddings().weight
        kinds = decoder_layers(model)
        packed = packed_elements(model)
        is_tied = model.get_output_embeddings().weight is embedding
        towers = tower_names(model)
        unreached = sum(p.numel() for name, p in model.named_parameters() if is_within(name, towers))
        settings = Settings(dict(lora))
        peft_config = adapter_of(settings, model) if settings.use_peft else None
        if peft_config is not None:
            try:
                model = get_peft_model(model, peft_config)
            except ValueError:
                raise_errors(list(refused_targets(build_on_meta(config), settings)))
                raise
    text = config.get_text_config()
    fields = _counts(model) | _widths(text) | _dropouts(text)
    fields["multiplied"] = fields["parameters"] - (0 if is_tied else embedding.numel())
    fields["packed"] = packed
    fields["unreached"] = unreached
    fields["decoder_layers"] = kinds
    fields["adapted"] /= fields["layers"]
    fields["dtype"] = str(config.dtype or "float32").removeprefix("torch.")
    flops = model_flops(model)
    fields["flops"] = flops.weights, flops.trained, [*flops.attention.items()]  # JSON has no key that is None
    return fields


def _counts(model: Any) -> dict[str, Any]:
    """`adapted`: of all layers."""
    tensors = []
    adapted = 0
    is_gated = False
    for name, weight in model.named_parameters():
        tensors.append(capacity.SwapTensor(weight.numel(), weight.ndim > 1, weight.requires_grad))
        if "lora_A" in name:
            adapted += weight.shape[-1]
        if "gate_proj" in name or "gate_up_proj" in name:
            is_gated = True
    return {
        "tensors": [[*tensor, count] for tensor, count in Counter(tensors).items()],
        "parameters": sum(tensor.size for tensor in tensors),
        "trainable": sum(tensor.size for tensor in tensors if tensor.trained),
        "adapted": adapted,
        "gated": is_gated,
    }


def _widths(text: Any) -> dict[str, int]:
    """Those of the widest layer, where they differ."""
    layers = configs_of_layers(text)
    of_layers = [_widths_of_layer(layer) for layer in layers]
    widest = {name: max(widths[name] for widths in of_layers) for name in of_layers[0]}
    return widest | {
        "layers": len(layers),
        "hidden": text.hidden_size,
        "embedding": text.vocab_size * text.hidden_size,
        "positions": getattr(text, "max_position_embeddings", 0),
    }


def _dropouts(text: Any) -> dict[str, bool]:
    """By the configuration's names: `attn_pdrop`, `attention_dropout`, and RESIDUAL_DROPOUTS."""
    dropping = [name for name, share in text.to_dict().items() if "drop" in name and isinstance(share, float) and share]
    return {
        "drops_scores": any("att" in name for name in dropping),
        "drops_residual": any(name in RESIDUAL_DROPOUTS for name in dropping),
    }


def _widths_of_layer(layer: Any) -> dict[str, int]:
    def value(name: str, default: int) -> int:
        return getattr(layer, name, None) or default

    hidden = layer.hidden_size
    heads = value("num_attention_heads", 1)  # Mamba has none
    head_width = value("qk_head_dim", value("head_dim", hidden // heads))  # the former in latent attention
    ffn = value("intermediate_size", value("n_inner", 4 * hidden))
    experts, active = active_experts(layer)
    if experts:
        ffn = active * value("moe_intermediate_size", ffn)
    return {
        "heads": heads,
        "query_width": heads * head_width,
        "kv_width": value("num_key_value_heads", heads) * head_width,
        "ffn": ffn,
    }
