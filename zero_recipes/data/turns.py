"""Masks of the assistant's tokens for chat templates without `{% generation %}`, by rendering prefixes.

An assistant's turn begins where the conversation before it ends, rendered with the generation prompt: what the model is
given when it is asked. Its text ends with the token that ends a turn, the first special token that the template writes
after an answer.
"""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from zero_recipes.core.findings import library_error_as_finding, refusal
from zero_recipes.data.forms import Rows

ANSWER = "zero recipes"  # a text that no template changes


def mask_by(rows: Rows, tokenizer: PreTrainedTokenizerBase, training_args) -> str | None:
    """How the assistant's tokens are found here: "turn" or "answer"; None where TRL does it, or nobody asked for it."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    named, template = getattr(training_args, "assistant_mask", None), tokenizer.chat_template
    columns = rows.column_names or list(next(iter(rows)))
    if not training_args.assistant_only_loss or not template or named == "template" or "input_ids" in columns:
        return None
    if named is not None or has_generation_markers(template):
        return named
    try:
        get_training_chat_template(tokenizer)
    except Exception:  # ValueError where TRL has no version of its own, others from a template that takes no tool calls
        return "turn"
    return None


def masked(rows: Rows, tokenizer: PreTrainedTokenizerBase, training_args, workers: int | None = None) -> Rows:
    """The rows with input_ids and assistant_masks where the masks are made here; else as they are. Raises Refusal."""
    how = mask_by(rows, tokenizer, training_args)
    if how is None:
        return rows
    only = training_args.completion_only_loss is not False
    with library_error_as_finding("masking all but the assistant's tokens"):
        keywords = {"end": _end_of_turn(tokenizer), "how": how, "only_completion": only, "tokenizer": tokenizer}
        several = {"fn_kwargs": keywords} | ({} if workers is None else {"num_proc": workers})
        columns = rows.column_names or list(next(iter(rows)))
        return rows.map(_masked, with_indices=True, remove_columns=columns, **several)


def _masked(row: dict[str, Any], number: int, end: str, how: str, only_completion: bool, tokenizer) -> dict[str, Any]:
    prompt = row.get("prompt") or []
    messages = prompt + row["completion"] if prompt else row["messages"]
    tools = row.get("tools")
    options = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    options |= row.get("chat_template_kwargs") or {}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    spans = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or (only_completion and at < len(prompt)):
            continue
        before = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True, **options)
        if not text.startswith(before):
            raise refusal("ZR892", row=number, turn=at)
        stop = text.find(end, len(before))
        stop = len(text) if stop < 0 else stop + len(end)
        start = len(before)
        if how == "answer" and isinstance(message.get("content"), str):
            start = max(start, text.find(message["content"].strip(), start, stop))
        if how == "turn":  # up to the next turn: line breaks that the template writes
            stop = len(text) - len(text[stop:].lstrip())
        spans.append((start, stop))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [int(any(a < last and first < b for a, b in spans)) for first, last in tokens["offset_mapping"]]
    return {"input_ids": tokens["input_ids"], "assistant_masks": inside}


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes after an answer, up to the first special token."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(ANSWER)[2]
    special = [token for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if token in tail]
    if not special:
        raise refusal("ZR891", tail=tail)
    return min(special, key=tail.index)
