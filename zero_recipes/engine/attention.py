"""Attention within the rows of a pack, without a mask.

A mask has the square of a pack's tokens. It rules flash attention out on CUDA.
torch's kernel for CPUs also computes the scores that it hides.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

_FIND_ROWS = masking_utils.find_packed_sequence_indices
FLASH = "flash_attention_of_rows"  # a name that transformers takes for flash attention


def has_row_kernel(device: str, precision: str) -> bool:
    """Whether a pack can be computed row by row here. Flash attention needs Ampere."""
    return device == "cpu" or (precision != "fp32" and torch.cuda.get_device_capability() >= (8, 0))


def attend_by_row(wanted: bool, told: Collection[str] = ()) -> None:
    """Have sdpa compute a pack row by row; `wanted` false: under a mask, as transformers does.

    `told`: types of models that hand TRL's `cu_seq_lens_q` on to sdpa. Packs of others keep their mask.
    For the whole process. The last call counts.

    Private: `sdpa_attention_forward`, `find_packed_sequence_indices` (transformers 5.23, masking_utils.py).
    The latter waits for the device in every step: it asks whether there is a second row.
    """

    def mask(config=None, **keywords):
        if config.model_type in told and _is_of_pack(**keywords):
            window = keywords.get("local_size") or 0
            return torch.empty(1, 1, 0, window, dtype=torch.bool, device=keywords["device"])
        return masking_utils.sdpa_mask(config=config, **keywords)

    AttentionInterface.register("sdpa", _by_row if wanted else sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa", mask if wanted else masking_utils.sdpa_mask)
    masking_utils.find_packed_sequence_indices = _rows_of if wanted else _FIND_ROWS
    _IN_FORCE.update(wanted=wanted, told=told)


_IN_FORCE = {"wanted": False, "told": ()}  # of this process


@contextlib.contextmanager
def tried() -> Iterator[None]:
    """A block in which `attend_by_row` may be called as one likes: afterwards the process attends as before."""
    before = dict(_IN_FORCE)
    try:
        yield
    finally:
        attend_by_row(**before)


def _rows_of(position_ids: torch.Tensor) -> torch.Tensor:
    begins = position_ids.diff(dim=-1) != 1
    return torch.nn.functional.pad(begins.cumsum(-1), (1, 0))


def _is_of_pack(attention_mask, allow_is_causal_skip, q_length, kv_length, use_vmap, **keywords) -> bool:
    if attention_mask is not None or q_length != kv_length or "allow_is_bidirectional_skip" in keywords:
        return False
    return not (allow_is_causal_skip or use_vmap)


def _by_row(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **keywords):
    if attention_mask is None or attention_mask.numel():
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **keywords
        )
    boundaries = keywords.get("cu_seq_lens_q")
    if boundaries is None:
        raise ValueError("A pack needs cu_seq_lens_q and max_length_q, as TRL's collator has them, or attention_mask")
    window = attention_mask.shape[3]  # 0: none
    if kernel_takes(query.device.type, computed_in(query), query.shape[3], value.shape[3], dropout):
        return _by_kernel(query, key, value, boundaries, keywords["max_length_q"], window, scaling), None
    if not hasattr(attention_mask, "lengths"):  # all layers have the same mask
        attention_mask.lengths = boundaries.diff().tolist()
    # torch's own way for shared keys and values has no fast kernel on CPUs
    groups = query.shape[1] // key.shape[1]
    tensors = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    rows = [tensor.split(attention_mask.lengths, 2) for tensor in tensors]
    outputs = []
    for row in zip(*rows, strict=True):
        length = row[0].shape[2]
        seen = None
        if 0 < window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        outputs.append(attend(*row, attn_mask=seen, dropout_p=dropout, scale=scaling, is_causal=seen is None))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def computed_in(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which an operator computes with this tensor: autocast's, where that is on."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def kernel_takes(device: str, dtype: torch.dtype, size: int, value_size: int, dropout: float) -> bool:
    """Whether varlen_attn can train heads of these sizes. Else each row is a call of sdpa.

    Some GPUs have no gradient for sizes from 193 to 224 (torch 2.13, native/transformers/cuda/sdp_utils.cpp).
    """
    fits = size == value_size and size % 8 == 0 and (size <= 192 or size == 256)
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and fits and not dropout


def _by_kernel(query, key, value, boundaries, longest, window, scale) -> torch.Tensor:
    """query, key, value: (1, heads, tokens, size). Returns (1, tokens, heads, size)."""
    dtype = computed_in(query)
    packed = [tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, value)]
    seen = (window - 1, 0)  # before each position and after it; -1: all
    grouped = query.shape[1] != key.shape[1]
    output = varlen_attn(
        *packed, boundaries, boundaries, longest, longest, scale=scale, window_size=seen, enable_gqa=grouped
    )
    return output.unsqueeze(0)


def attention_of(model: PreTrainedModel) -> str:
    """The attention that a model computes with, as "sdpa".

    Private: `_attn_implementation` of a configuration.
    """
    return model.config._attn_implementation


def attend_as_flash(model: PreTrainedModel, forward: Callable[[], Any]) -> None:
    """Let a model attend on a CPU as with a kernel of flash attention, by what transformers hands to that.

    One with classes of its own for flash attention stays as it is. `forward` runs the model once, to see that.
    """
    calls = []

    def within_rows(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        calls.append(1)
        return _within_rows(*arguments, **keywords)

    AttentionInterface.register(FLASH, within_rows)
    AttentionMaskInterface.register(FLASH, masking_utils.flash_attention_mask)
    before = attention_of(model)
    model.config._attn_implementation = FLASH
    forward()
    if not calls:
        model.config._attn_implementation = before


def _within_rows(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **keywords):
    """Attention within rows, by the boundaries that transformers takes for flash attention. Windows are left out."""
    boundaries = keywords.get("cu_seq_lens_q")
    positions = keywords.get("position_ids")
    lengths = [query.shape[2]]
    if boundaries is not None:
        lengths = boundaries.diff().tolist()
    elif positions is not None:
        begins = [*torch.nonzero(positions.flatten() == 0).flatten().tolist(), query.shape[2]]
        lengths = torch.tensor(begins).diff().tolist()
    groups = query.shape[1] // key.shape[1]
    tensors = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    rows = zip(*[tensor.split(lengths, 2) for tensor in tensors], strict=True)
    outputs = [attend(*row, scale=scaling, is_causal=True) for row in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None
