"""Model FLOPs: what forward and backward of a model's matrix products and attention take (docs/metrics.md).

PaLM, arXiv:2204.02311, appendix B: 6 FLOPs for each weight and token and 12·L·H·Q·T for attention (L layers, H heads, Q
their width, T tokens of a row); so Megatron-LM, arXiv:2104.04473, appendix.
A causal row counts half of their square of attention, as in FlashAttention-2, arXiv:2307.08691, section 4.1.
The output layer counts for every token, as in the papers; on GPUs TRL 1.16 computes it only for those with loss
(trl/trainer/utils.py, `_fused_forward`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_recipes.model.layer_configs import configs_of_layers

if TYPE_CHECKING:
    import torch

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in configs of transformers
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # by the kind of a layer


@dataclass(frozen=True)
class ModelFlops:
    """What decides a model's FLOPs: weights that multiply each token, and widths of its attention."""

    weights: float  # that multiply one token
    trained: float  # of them, those that get a gradient
    # {how far a token looks back in some layers, None without a limit: the sum of their widths, H·(Q + V)}
    attention: dict[int | None, int]

    def of_step(self, tokens: float, squares: Iterable[float], again: float = 0, attention_again: float = 0) -> float:
        """FLOPs of forward and backward passes over some rows.

        `tokens`: without padding; `squares`: over all rows, by `attention`'s keys.
        `again`, `attention_again`: forward passes of products and of attention that are computed besides.
        """
        looked_at = sum(width * square for width, square in zip(self.attention.values(), squares, strict=True))
        products = (4 + 2 * again) * self.weights + 2 * self.trained
        return products * tokens + (3 + attention_again) * looked_at

    def of_rows(self, lengths: Iterable[float]) -> float:
        """FLOPs of forward and backward of rows of these lengths, in tokens; packed rows each by itself."""
        rows = list(lengths)
        return self.of_step(sum(rows), [sum(squares(row, window) for row in rows) for window in self.attention])


def squares(length: float, window: int | None) -> float:
    """Twice the pairs of tokens of one causal row that look at each other: its square, less what a window hides."""
    seen = length if window is None else min(length, window)
    return 2 * seen * length - seen * seen


def model_flops(
    model: "torch.nn.Module", shape_of: Callable[[Any], Iterable[int]] = lambda weight: weight.shape
) -> ModelFlops:
    """The ModelFlops of a model, on whichever device.

    `shape_of`: gives a weight's whole shape, where it is partitioned.
    Raises AttributeError, TypeError or ZeroDivisionError where the model's config does not say how wide attention is.
    """
    import torch  # a plan need not wait for it

    from zero_recipes.model.towers import is_within, tower_names

    config = model.config.get_text_config()
    experts, active = active_experts(config)
    weights = trained = 0.0
    towers = tower_names(model)
    for name, module in model.named_modules():
        if is_within(name, towers):  # text never reaches them
            continue
        if isinstance(module, torch.nn.Embedding) or ".original_module" in name:  # PEFT trains a copy of the latter
            continue
        share = 1.0  # of the weights, that a token goes through
        if experts and "experts" in name.split("."):
            share = active / experts
        for weight_name, weight in module.named_parameters(recurse=False):
            shape = tuple(shape_of(weight))
            if isinstance(module, torch.nn.Linear) and weight_name == "weight":
                shape = (module.in_features, module.out_features)  # whatever it is packed to in 4 bit
            if len(shape) > 1 and not weight_name.endswith("bias"):
                size = share * math.prod(shape)
                weights += size
                if weight.requires_grad:
                    trained += size
    return ModelFlops(weights, trained, _attention(config))


def active_experts(config) -> tuple[int, int]:
    """How many experts a layer has, and to how many of them a token goes; (0, 0) of a dense model."""
    experts = _first_of(config, EXPERTS)
    active = _first_of(config, ACTIVE)
    return (experts, active) if experts and active else (0, 0)


def _first_of(config, names: Iterable[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def _attention(config) -> dict[int | None, int]:
    """Layers without a square (state spaces, linear attention) have none."""
    found = {}
    kinds = getattr(config, "layer_types", None)
    for number, layer in enumerate(configs_of_layers(config)):
        heads = getattr(layer, "num_attention_heads", None)
        if not heads:
            continue
        kind = kinds[number] if kinds else _kind_of(layer)
        if kind.endswith("attention") and not kind.startswith("linear"):
            key = WINDOWS.get(kind)
            window = getattr(layer, key, None) if key else None
            found[window] = found.get(window, 0) + heads * sum(_head_widths(layer, heads))
    return found


def _kind_of(layer: Any) -> str:
    """The kind of a layer whose model does not list them."""
    return "sliding_attention" if getattr(layer, "sliding_window", None) else "full_attention"


def _head_widths(layer: Any, heads: int) -> tuple[int, int]:
    """Of queries and of values: they differ in latent attention."""
    plain = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return getattr(layer, "qk_head_dim", None) or plain, getattr(layer, "v_head_dim", None) or plain
