"""Model FLOPs: what forward and backward of a model's matrix products and attention take (docs/metrics.md).

PaLM, arXiv:2204.02311, appendix B: 6 FLOPs for each weight and token and 12·L·H·Q·T for attention (L layers, H heads, Q
their width, T tokens of a row); so Megatron-LM, arXiv:2104.04473, appendix. Both count the whole square of
attention; here a causal row counts half of it, as in FlashAttention-2, arXiv:2307.08691, section 4.1. The output layer
counts for every token, as in the papers; on GPUs TRL 1.16 computes it only for those with loss (trl/trainer/utils.py,
`_fused_forward`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in configs of transformers
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class ModelFlops:
    """What one model takes. `attention`: {how far a token looks back in some of its layers, None without a limit:
    those layers' summed width of queries and values, H·(Q + V)}."""

    weights: float  # that multiply one token
    trained: float  # of them, those that get a gradient
    attention: dict[int | None, int]

    def of_step(self, tokens: float, squares: Iterable[float], again: float = 0, attention_again: float = 0) -> float:
        """FLOPs of forward and backward. `tokens`: without padding; `squares`: over all rows, by `attention`'s keys;
        `again`, `attention_again`: how many forward passes of products and of attention are computed besides."""
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
    """Count a model's own modules, on whichever device. `shape_of`: a weight's whole shape, where it is partitioned."""
    import torch  # a plan need not wait for it

    config = model.config.get_text_config()
    experts, active = active_experts(config)
    share = active / experts if experts else 1.0  # of the experts' weights, that a token goes through
    weights = trained = 0.0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) or ".original_module" in name:  # PEFT trains a copy of the latter
            continue
        for weight_name, weight in module.named_parameters(recurse=False):
            shape = tuple(shape_of(weight))
            if isinstance(module, torch.nn.Linear) and weight_name == "weight":
                shape = (module.in_features, module.out_features)  # whatever it is packed to in 4 bit
            if len(shape) > 1 and not weight_name.endswith("bias"):
                times = share if "experts" in name.split(".") else 1
                weights += times * math.prod(shape)
                trained += times * math.prod(shape) * weight.requires_grad
    return ModelFlops(weights, trained, _attention(config))


def active_experts(config) -> tuple[int, int]:
    """(experts of a layer, those of them that a token goes to); (0, 0) of a dense model."""
    experts, active = (next(filter(None, (getattr(config, n, None) for n in names)), 0) for names in (EXPERTS, ACTIVE))
    return (experts, active) if experts and active else (0, 0)


def _attention(config) -> dict[int | None, int]:
    """ModelFlops.attention, by the config; layers without a square (state spaces, linear attention) have none."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return {}
    plain = getattr(config, "head_dim", None) or config.hidden_size // heads
    widths = (getattr(config, name, None) or plain for name in ("qk_head_dim", "v_head_dim"))  # of queries, of values
    width, found = heads * sum(widths), {}
    alike = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    for kind in getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers:
        if kind.endswith("attention") and not kind.startswith("linear"):
            key = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
            window = None if key is None else getattr(config, key, None)
            found[window] = found.get(window, 0) + width
    return found
