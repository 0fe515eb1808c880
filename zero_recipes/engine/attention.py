"""Attention within the rows of a pack: row by row, and without a mask where the model hands on where rows begin.

A mask has the square of a pack's tokens. On CUDA it rules flash attention out.
torch's kernel for CPUs also computes the scores that it hides.
"""

from collections.abc import Collection

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

FIND_ROWS = masking_utils.find_packed_sequence_indices
AMPERE = (8, 0)  # flash attention needs it


def allow_cudnn(device: str, wanted: bool) -> None:
    """Whether sdpa may take cuDNN's attention on CUDA. For the whole process.

    torch 2.13 takes it first on Hopper, and builds a plan for every new shape (aten/src/ATen/native/cudnn/MHA.cpp):
    packs and padded batches have a new one in each step. The same fault: modelscope/FunASR#3704.
    """
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(wanted)


def has_row_kernel(device: str, precision: str) -> bool:
    """Whether a pack is computed faster row by row than under a mask."""
    if device == "cpu":
        return True
    return precision != "fp32" and torch.cuda.get_device_capability() >= AMPERE


def attend_by_row(wanted: bool, told: Collection[str] = ()) -> None:
    """Have sdpa compute a pack row by row; `wanted` false: under a mask, as transformers does.

    `told`: types of models whose layers are told where rows begin, by TRL's `cu_seq_lens_q`.
    No mask is made for their packs. For the whole process. The last call counts.

    Private: `sdpa_attention_forward`, `sdpa_mask`, `find_packed_sequence_indices` (transformers 5.23,
    integrations/sdpa_attention.py, masking_utils.py). The last reads in every step whether there is a second row.
    """

    def mask(config=None, **keywords):
        if config.model_type in told and _is_of_pack(**keywords):
            window = keywords.get("local_size") or 0
            return torch.empty(1, 1, 0, window, dtype=torch.bool, device=keywords["device"])
        return masking_utils.sdpa_mask(config=config, **keywords)

    AttentionInterface.register("sdpa", _by_row if wanted else sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa", mask if wanted else masking_utils.sdpa_mask)
    masking_utils.find_packed_sequence_indices = _rows_of_positions if wanted else FIND_ROWS


def _rows_of_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """The row of each position, counted from 0."""
    begins = position_ids.diff(dim=-1) != 1
    return torch.nn.functional.pad(begins.cumsum(-1), (1, 0))


def _is_of_pack(attention_mask, allow_is_causal_skip, q_length, kv_length, use_vmap, **keywords) -> bool:
    """Whether a mask that transformers asks for is a pack's: causal, with a window or without."""
    is_bidirectional = "allow_is_bidirectional_skip" in keywords
    is_plain = attention_mask is None and q_length == kv_length and not use_vmap and not is_bidirectional
    return is_plain and not allow_is_causal_skip


def _by_row(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **keywords):
    is_told = attention_mask is not None and attention_mask.numel() == 0
    window = 0
    lengths = None
    if is_told:
        boundaries = keywords["cu_seq_lens_q"]
        window = attention_mask.shape[3]
        if kernel_takes(query.device.type, computed_in(query), query.shape[3], value.shape[3], dropout):
            return _by_kernel(query, key, value, boundaries, keywords["max_length_q"], window, scaling), None
        lengths = _lengths(attention_mask, boundaries)
    elif attention_mask is not None and query.device.type == "cpu":
        lengths = _rows_of(attention_mask)
    if lengths is None or keywords.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **keywords
        )
    # torch's own way for shared keys and values has no fast kernel on CPUs
    groups = query.shape[1] // key.shape[1]
    queries = query.split(lengths, dim=2)
    keys = repeat_kv(key, groups).split(lengths, dim=2)
    values = repeat_kv(value, groups).split(lengths, dim=2)
    outputs = []
    for row in zip(queries, keys, values, strict=True):
        seen = _within(window, row[0]) if 0 < window < row[0].shape[2] else None
        outputs.append(attend(*row, attn_mask=seen, dropout_p=dropout, scale=scaling, is_causal=seen is None))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def computed_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of attention: autocast's where it is on."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def kernel_takes(device: str, dtype: torch.dtype, size: int, value_size: int, dropout: float) -> bool:
    """Whether varlen_attn (torch 2.13) can train such heads; else each row of a pack is a call of sdpa.

    `size`, `value_size`: of a head's queries and values. Flash attention has no gradient of sizes from 193 to 224
    on some GPUs (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    fits = size == value_size and size % 8 == 0 and (size <= 192 or size == 256)
    return device == "cuda" and in_16_bits and fits and not dropout


def _by_kernel(query, key, value, boundaries, longest: int, window: int, scale: float | None) -> torch.Tensor:
    """query, key, value: (1, heads, tokens, size). Returns (1, tokens, heads, size)."""
    dtype = computed_in(query)
    packed = [tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, value)]
    output = varlen_attn(
        *packed,
        cu_seq_q=boundaries,
        cu_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
        scale=scale,
        window_size=(window - 1, 0),  # (-1, 0): all of the row so far
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0)


def _within(window: int, query: torch.Tensor) -> torch.Tensor:
    """What each position of a row sees: itself and the `window` - 1 before it."""
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def _lengths(mask: torch.Tensor, boundaries: torch.Tensor) -> list[int]:
    """Of a pack's rows. All layers have the same mask: read once."""
    if not hasattr(mask, "rows_of_pack"):
        mask.rows_of_pack = boundaries.diff().tolist()
    return mask.rows_of_pack


def _rows_of(mask: torch.Tensor) -> list[int] | None:
    """Lengths of a pack's rows, if each position sees only its own row up to itself."""
    if mask.dtype != torch.bool or mask.shape[:2] != (1, 1) or mask.shape[2] != mask.shape[3]:
        return None
    if not hasattr(mask, "rows_of_pack"):
        begins = (~mask[0, 0].diagonal(-1)).cumsum(0)
        row = torch.nn.functional.pad(begins, (1, 0))  # row of each position
        within = (row[:, None] == row).tril()
        mask.rows_of_pack = None
        if row[-1] and torch.equal(within, mask[0, 0]):
            mask.rows_of_pack = row.bincount().tolist()
    return mask.rows_of_pack
