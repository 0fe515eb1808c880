"""A kernel in place of FlashAttention, in torch, on any device: what transformers hands to the real one decides."""

from types import SimpleNamespace

import torch


def _attend(query, key, value, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None, **_):
    """One row. query: (length, heads, size); key and value may have fewer heads. Returns (length, heads, size)."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window_size[0] >= 0:
        seen &= distance <= window_size[0]
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:  # attention sinks
        scores = torch.cat([scores, s_aux[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def flash_attn_func(query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, s_aux=None, deterministic=False):  # fmt: skip
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    rows = zip(query, key, value, strict=True)
    return torch.stack([_attend(*row, **options, s_aux=s_aux) for row in rows])


def flash_attn_varlen_func(query, key, value, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                           max_seqlen_k=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, s_aux=None, deterministic=False):  # fmt: skip
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    lengths = cu_seqlens_q.diff().tolist()
    rows = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([_attend(*row, **options, s_aux=s_aux) for row in rows])


MODULE = SimpleNamespace(
    flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
)


def install(patch) -> None:
    """`patch`: pytest's monkeypatch, or a name that has its setattr and setitem."""
    import sys

    from transformers import modeling_flash_attention_utils as flash
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels
    from transformers.utils import import_utils

    patch.setitem(sys.modules, "kernels", SimpleNamespace())
    patch.setattr(hub_kernels, "get_kernel", lambda *_, **__: MODULE)
    patch.setattr(flash, "_loaded_implementation", None)  # transformers keeps the last one
    for where in (modeling_utils, hub_kernels, import_utils):
        patch.setattr(where, "is_kernels_available", lambda *_: True)
