"""Tokens and labels of rows, before they are truncated and packed: which tokens have a loss.

TRL tokenizes and masks. It lacks masks of the assistant's turns for chat templates without `{% generation %}`, turns of
`weight: 0`, and markers that a text and the tokenizer both write.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.core.findings import library_error_as_finding, refusal
from zero_recipes.core.host import Host
from zero_recipes.data.audit import token_batches
from zero_recipes.data.forms import Row, Rows, column_names
from zero_recipes.engine import huggingface

ROWS_OF_A_WORKER = 4000  # at least: 2 s of work; workers take 0.2 s to start for each of TRL's five steps
ANSWER = "zero recipes"  # a text that no template changes
NO_LOSS = -100


def tokenise(rows: Rows, tokenizer: Tokenizer, training_args, assistant_mask: str | None = None) -> Rows:
    """input_ids and labels of each row, before truncation, dropping, packing and shuffling.

    By the code that SFTTrainer trains with. `tokenizer`: with the chat template applied.
    """
    tokenised = tokenise_as_written(rows, tokenizer, training_args, assistant_mask)
    return with_single_markers(rows, tokenised, tokenizer)[0]


def tokenise_as_written(rows: Rows, tokenizer: Tokenizer, training_args, assistant_mask: str | None) -> Rows:
    """`tokenise`, with markers that stand twice."""
    whole = copy.copy(training_args)
    whole.max_length = None
    whole.shuffle_dataset = False
    if isinstance(rows, Dataset):
        whole.dataset_num_proc = workers(len(rows), training_args.dataset_num_proc)
    how = mask_by(rows, tokenizer, whole, assistant_mask)
    template = None
    if how is not None:
        rows = _with_masks(rows, how, tokenizer, whole)
    elif "input_ids" not in column_names(rows):
        template = huggingface.training_template(tokenizer, whole)
    rows = huggingface.prepare_dataset(rows, tokenizer, whole, packing=False)
    return _silenced(rows, template, tokenizer, whole)


def workers(rows: int, requested: int | None) -> int | None:
    """How many processes prepare so many rows, each enough to be worth its start; None for this process alone."""
    if requested is not None:
        return requested
    worth = min(Host().cores(), rows // ROWS_OF_A_WORKER)
    return worth if worth > 1 else None


def _in_parallel(rows: Rows, training_args) -> dict[str, Any]:
    """Of `map`; a stream knows no processes."""
    return {"num_proc": training_args.dataset_num_proc} if isinstance(rows, Dataset) else {}


# Masks by rendering prefixes. A turn begins where the conversation before it ends, rendered with the generation prompt.
# It ends with the first special token that the template writes after an answer.


def mask_by(rows: Rows, tokenizer: Tokenizer, training_args, named: str | None = None) -> str | None:
    """How the assistant's tokens are found: "turn" or "answer"; None where TRL does it, or none is needed.

    `named`: the recipe's assistant_mask.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template = tokenizer.chat_template
    if not training_args.assistant_only_loss or not template or named == "template":
        return None
    if "input_ids" in column_names(rows):
        return None
    if named is not None or has_generation_markers(template):
        return named
    try:
        get_training_chat_template(tokenizer)
    except Exception:  # ValueError where TRL has no version of its own, others from a template that takes no tool calls
        return "turn"
    return None


def _with_masks(rows: Rows, how: str, tokenizer: Tokenizer, training_args) -> Rows:
    """The rows with input_ids and assistant_masks. Raises Refusal."""
    with library_error_as_finding("masking all but the assistant's tokens"):
        keywords = {"end": _end_of_turn(tokenizer), "how": how, "tokenizer": tokenizer}
        keywords["only_completion"] = training_args.completion_only_loss is not False
        return rows.map(_masked, with_indices=True, fn_kwargs=keywords, **_in_parallel(rows, training_args))


def _masked(row: Row, number: int, end: str, how: str, only_completion: bool, tokenizer) -> Row:
    chat = Chat.of_row(row, tokenizer)
    text = chat.render(chat.messages)
    first = chat.prompt_turns if only_completion else 0
    spans = []
    for at in range(first, len(chat.messages)):
        if chat.messages[at]["role"] == "assistant":
            start, stop = _span(chat, text, at, end, number)
            if how == "answer":
                start = _start_of_content(chat.messages[at], text, start, stop)
            else:
                stop = _next_turn(text, stop)
            spans.append((start, stop))
    ids, inside = _tokens_inside(text, spans, tokenizer)
    return {"input_ids": ids, "assistant_masks": inside}


class Chat(NamedTuple):
    """A row's messages, and what its chat template is given."""

    messages: list[Row]
    prompt_turns: int  # of the messages
    options: dict[str, Any]
    tokenizer: Tokenizer

    @classmethod
    def of_row(cls, row: Mapping[str, Any], tokenizer, chat_template: str | None = None) -> "Chat":
        prompt = row.get("prompt") or []
        messages = prompt + row["completion"] if prompt else row["messages"]
        tools = row.get("tools")
        if isinstance(tools, str):
            tools = json.loads(tools)
        options = {"tools": tools, "chat_template": chat_template}
        options |= row.get("chat_template_kwargs") or {}
        return cls(messages, len(prompt), options, tokenizer)

    def render(self, messages: list[Row], to_answer: bool = False) -> str:
        """The messages as text; `to_answer`: with the generation prompt."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_answer, **self.options
        )


def _span(chat: Chat, text: str, at: int, end: str, row: int) -> tuple[int, int]:
    """Where message `at` stands in the rendered conversation: after its header, up to and with the token that ends it.

    Raises Refusal where the template writes earlier messages otherwise once it follows.
    """
    message = chat.messages[at]
    to_answer = message["role"] == "assistant"
    if at == 0:  # there is nothing to render before it
        start = _end_of_header(chat, text) if to_answer else 0
    else:
        before = chat.render(chat.messages[:at], to_answer)
        if not text.startswith(before):
            raise refusal("ZR892", row=row, turn=at)
        start = len(before)
    content = message.get("content")
    search_from = start
    if isinstance(content, str) and end in content:  # the text itself has the token that ends a turn
        found = text.find(content.strip(), start)
        search_from = max(start, found + len(content.strip()))
    stop = text.find(end, search_from)
    if stop < 0:
        return start, len(text)
    return start, stop + len(end)


def _end_of_header(chat: Chat, text: str) -> int:
    """Where an answer begins that comes first."""
    question = [{"role": "user", "content": "a"}]
    header = chat.render(question, to_answer=True).removeprefix(chat.render(question))
    at = text.find(header)
    return 0 if at < 0 else at + len(header)


def _start_of_content(message: Row, text: str, start: int, stop: int) -> int:
    if not isinstance(message.get("content"), str):
        return start
    return max(start, text.find(message["content"].strip(), start, stop))


def _next_turn(text: str, stop: int) -> int:
    """Behind the line breaks that the template writes after a turn."""
    return len(text) - len(text[stop:].lstrip())


def _tokens_inside(text: str, spans: list[tuple[int, int]], tokenizer) -> tuple[list[int], list[int]]:
    """(the text's token ids, 1 for each token of which a character is inside one of the spans)."""
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(tokens["offset_mapping"]).reshape(-1, 2)
    inside = np.zeros(len(offsets), dtype=np.int64)
    for start, stop in spans:
        inside[(offsets[:, 0] < stop) & (start < offsets[:, 1])] = 1
    return tokens["input_ids"], inside.tolist()


def _end_of_turn(tokenizer: Tokenizer) -> str:
    """What the template writes after an answer, up to the first special token."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(ANSWER)[2]
    special = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
    written = [token for token in special if token in tail]
    if not written:
        raise refusal("ZR891", tail=tail)
    return min(written, key=tail.index)


# turns of weight 0


def _silenced(rows: Rows, template: str | None, tokenizer: Tokenizer, training_args) -> Rows:
    """Tokenized rows, with no loss on the turns of `weight: 0`. Raises Refusal.

    `template`: which they are rendered by, if it is not the tokenizer's own.
    """
    columns = [name for name in ("messages", "prompt", "completion") if name in column_names(rows)]
    if not columns:
        return rows
    if isinstance(rows, Dataset) and not any(map(_silent_turns, rows.select_columns(columns))):
        return rows
    with library_error_as_finding("leaving turns of weight 0 without a loss"):
        keywords = {"tokenizer": tokenizer, "chat_template": template}
        return rows.map(_silence, with_indices=True, fn_kwargs=keywords, **_in_parallel(rows, training_args))


def _silent_turns(row: Row) -> list[int]:
    """Numbers of the messages that the row gives no loss."""
    messages = row.get("messages") or []
    if isinstance(row.get("prompt"), list):
        messages = row["prompt"] + row["completion"]
    return [number for number, message in enumerate(messages) if message.get("weight") == 0]


def _silence(row: Row, number: int, tokenizer: Tokenizer, chat_template: str | None) -> Row:
    silent = _silent_turns(row)
    if not silent:
        return {"labels": row["labels"]}
    chat = Chat.of_row(row, tokenizer, chat_template)
    text = chat.render(chat.messages)
    end = _end_of_turn(tokenizer)
    spans = []
    for at in silent:
        start, stop = _span(chat, text, at, end, number)
        spans.append((start, _next_turn(text, stop)))
    ids, inside = _tokens_inside(text, spans, tokenizer)
    if ids != row["input_ids"]:
        raise ValueError(f"row {number}: its tokens are not those of its text")
    labels = np.where(inside, NO_LOSS, row["labels"])
    return {"labels": labels.tolist()}


# markers that are there twice


def with_single_markers(rows: Rows, tokenised: Rows, tokenizer: Tokenizer) -> tuple[Rows, list[int]]:
    """(the tokenised rows, in which the beginning and the end of a text stand once; numbers of those that had two).

    A text or a template may write a marker that the tokenizer or TRL adds too. TRL 1.16 takes care of the end that it
    appends itself. Rows of token ids stay as they are. Of a stream no numbers are known.
    """
    if "input_ids" in column_names(rows):
        return tokenised, []
    doubled = []
    if isinstance(tokenised, Dataset):
        doubled = _rows_with_doubled_markers(tokenised, tokenizer)
        if not doubled:
            return tokenised, []
    markers = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    return tokenised.map(_keep_one, fn_kwargs=markers), doubled


def without_beginning(text: str, tokenizer: Tokenizer) -> str:
    """The text without the marker of its beginning, where the tokenizer adds one."""
    beginning = tokenizer.bos_token
    if beginning is None or tokenizer("")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return text
    return text.removeprefix(beginning)


def _rows_with_doubled_markers(rows: Dataset, tokenizer: Tokenizer) -> list[int]:
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    markers = [marker for marker in (bos, eos) if marker is not None]
    found = []
    first_row = 0
    for ids, _, lengths in token_batches(rows):
        ends = np.cumsum(lengths)
        is_repeat = (ids[1:] == ids[:-1]) & np.isin(ids[1:], markers)
        repeats = np.flatnonzero(is_repeat) + 1
        for row in np.unique(np.searchsorted(ends, repeats, side="right")):
            of_row = ids[ends[row] - lengths[row] : ends[row]]
            if _doubled(of_row, bos, eos).any():
                found.append(first_row + int(row))
        first_row += len(lengths)
    return found


def _doubled(ids: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    """For each token whether it repeats the marker before it; shape (tokens,).

    A token that is both markers may end a text and begin the next: then only the row's own beginning and end count.
    """
    again = np.zeros(len(ids), dtype=bool)
    same = ids[1:] == ids[:-1]
    if eos != bos:
        again[1:] = same & (ids[1:] == eos)
    at = 1
    while at < len(ids) and ids[0] == bos and same[at - 1]:
        again[at] = True
        at += 1
    at = len(ids) - 1
    while at > 0 and ids[-1] == eos and same[at - 1]:
        again[at] = True
        at -= 1
    return again


def _keep_one(row: Row, bos: int | None, eos: int | None) -> Row:
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    labels = np.asarray(row["labels"], dtype=np.int64)
    again = _doubled(ids, bos, eos)
    for at in np.flatnonzero(again)[::-1]:  # the one that stays has a loss if any of them has
        labels[at - 1] = max(labels[at - 1], labels[at])
    return {"input_ids": ids[~again].tolist(), "labels": labels[~again].tolist()}
