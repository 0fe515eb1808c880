"""Whether packed rows stay apart in a model: found by packing rows in a small model of its class.

A row must have the logits that it has alone, whatever stands before it. Masks, positions, windows, convolutions and
states from token to token all show in that.
"""

import contextlib
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.config.settings import Settings
from zero_recipes.engine import attention
from zero_recipes.engine.huggingface import attention_kernel
from zero_recipes.engine.linear_attention import KernelCalls, computed_in_torch, kernels_of, missing_packages
from zero_recipes.model.miniature import TOKENS, miniature, one_thread

ROW = 13  # tokens of the row that is looked at
ROWS_BEFORE = (10, 6)  # tokens of one row and of another before it: no width of a model is 23 or 19
SAME = 1e-3  # of the largest logit. Rows that see each other differ by 0.1 and more.


@dataclass(frozen=True)
class PackedRows:
    """What a model does with packed rows."""

    are_apart: bool | None  # None: no small model of the class can be made, or it raises
    told: frozenset[str] = frozenset()  # its types, where sdpa is told where rows begin (engine/attention.py)
    missing: tuple[str, ...] = ()  # packages that are not installed, without which a pack stops the run
    slow: tuple[str, ...] = ()  # packages that are not installed, without which layers are computed in torch


UNKNOWN = PackedRows(None)


def packed_rows(config: Any, settings: Settings) -> PackedRows:
    """Find out what a recipe's model does with packed rows. Looked up where this process has found it before.

    `config`: the model's configuration. UNKNOWN for anything else.
    """
    if not isinstance(config, PretrainedConfig):
        return UNKNOWN
    attends = settings.attn_implementation
    longest = None
    if settings.max_length is not None:
        longest = settings.per_device_train_batch_size * settings.max_length
    key = (type(config), config.to_json_string(use_diff=False), settings.trust_remote_code, attends, longest)
    if key not in _FOUND:
        _FOUND[key] = find_out(
            config,
            settings.trust_remote_code,
            longest,
            in_flash=attention_kernel(attends) is not None,
            attn_implementation=attends if attends in ("sdpa", "eager") else None,
        )
    return _FOUND[key]


_FOUND: dict[tuple, PackedRows] = {}  # the same for every run of this process


def find_out(
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    longest: int | None = None,
    in_flash: bool = False,
    attn_implementation: str | None = None,
) -> PackedRows:
    """Pack rows in a small model of the class, and compare.

    Args:
        config: the model's.
        trust_remote_code: whether code that comes with the model may run.
        longest: tokens of a sequence in the run; None: more than any window.
        in_flash: with flash attention, which takes the boundaries of rows instead of a mask.
        attn_implementation: "sdpa" or "eager". None: what transformers takes.
    """
    model = miniature(config, trust_remote_code, longest, attn_implementation)
    if model is None:
        return UNKNOWN
    draw = torch.Generator().manual_seed(1)
    first, other, row = (_tokens(length, draw) for length in (*ROWS_BEFORE, ROW))
    with attention.tried(), torch.no_grad(), one_thread(), contextlib.suppress(Exception):  # a class may raise anything
        attention.attend_by_row(False)
        if in_flash:
            attention.attend_as_flash(model, lambda: logits_of_last(model, [row]))
        calls, alone = logits_of_last(model, [row])
        packed_calls, packed = logits_of_last(model, [first, row])
        _, otherwise = logits_of_last(model, [other, row])
        are_apart = are_same(alone, packed) and are_same(alone, otherwise)
        return PackedRows(
            are_apart=are_apart,
            told=_told(model, [first, row], packed) if are_apart else frozenset(),
            missing=missing_packages(packed_calls.with_boundaries),
            slow=missing_packages(calls.called),
        )
    return UNKNOWN


def _tokens(count: int, draw: torch.Generator) -> list[int]:
    return torch.randint(TOKENS.start, TOKENS.stop, (count,), generator=draw).tolist()


def logits_of_last(model: PreTrainedModel, rows: list[list[int]]) -> tuple[KernelCalls, torch.Tensor]:
    """Run rows that TRL packs. Returns (the kernels that were called, the logits of the last row)."""
    batch = packed_batch(rows)
    batch.pop("labels")
    with computed_in_torch(kernels_of(model), sum(map(len, rows))) as calls:
        logits = model(**batch, use_cache=False).logits[0]
    return calls, logits[-len(rows[-1]) :]


def packed_batch(rows: list[list[int]]) -> dict[str, Any]:
    """Rows in one sequence, as TRL's collator makes them, with labels."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    joined = [*chain(*rows)]
    packed = {"input_ids": joined, "labels": joined, "seq_lengths": [len(row) for row in rows]}
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([packed])


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether logits differ by no more than the order of sums. False for numbers that are not finite."""
    return bool((one - other).abs().max() <= SAME * one.abs().max())


def _told(model: PreTrainedModel, rows: list[list[int]], expected: torch.Tensor) -> frozenset[str]:
    """The types of a model whose packs sdpa computes row by row with the same result. Empty where it does not."""
    if attention.attention_of(model) != "sdpa":
        return frozenset()
    types = {module.config.model_type for module in model.modules() if hasattr(module, "config")}
    attention.attend_by_row(True, types)
    with contextlib.suppress(Exception):
        _, found = logits_of_last(model, rows)
        if are_same(expected, found):
            return frozenset(types)
    return frozenset()
