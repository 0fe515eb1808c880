"""Do the trained tokens say what the rows say? Tokens are decoded again and held against the rows' texts.

Each text of a row is looked for in the decoded tokens, in its order, with a loss or without one as the recipe and the
row say. White space is left out on both sides: templates trim it, and tokenizers add it.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.core.findings import Finding, finding
from zero_recipes.data.audit import decoded_parts
from zero_recipes.data.forms import Row

COMPARED_ROWS = 2000  # of a split, spread over all of it
MERGED = 16  # characters at a prompt's end that may be part of the answer's first token
END_OF_THOUGHT = "</think>"


class Text(NamedTuple):
    name: str
    text: str
    has_loss: bool
    can_merge: bool = False  # its end may be in one token with the next text's beginning


class Tokens(NamedTuple):
    """A tokenized row, decoded, without white space. `losses`: a byte for each character, 1 with a loss."""

    text: str
    losses: bytes


def as_written_findings(
    rows: Dataset, tokenised: Dataset, tokenizer: Tokenizer, training_args, split: str
) -> Iterator[Finding]:
    """What the tokens, whole, do not show of the rows' texts. At most two findings."""
    if "input_ids" in rows.column_names:
        return
    numbers = _spread(len(rows), COMPARED_ROWS)
    tokens = tokenised.select_columns(["input_ids", "labels"]).select(numbers)
    wrong_loss: list[tuple[int, str]] = []
    lost: list[tuple[int, Text]] = []
    for number, row, trained in zip(numbers, rows.select(numbers), tokens, strict=True):
        fault = _fault(_texts(row, training_args), _decoded(trained, tokenizer), tokenizer)
        if isinstance(fault, str):
            wrong_loss.append((number, fault))
        elif fault is not None:
            lost.append((number, fault))
    compared = {"rows": len(numbers), "split": split}
    if wrong_loss:
        row, fault = wrong_loss[0]
        yield finding("ZR527", count=len(wrong_loss), row=row, fault=fault, **compared)
    if lost:
        trained = [(number, text) for number, text in lost if text.has_loss]
        row, text = (trained or lost)[0]
        level = "error" if trained else "warning"
        words = text.text.strip()[:80]
        yield finding("ZR528", level=level, count=len(lost), row=row, name=text.name, text=words, **compared)


def _spread(count: int, most: int) -> range:
    """Numbers of at most so many rows, from the first on."""
    return range(0, count, -(-count // most))


def _texts(row: Row, training_args) -> list[Text]:
    """Of a converted row, in their order."""
    on_prompt = training_args.completion_only_loss is False
    if isinstance(row.get("messages"), list):
        return _turns(row["messages"], len(row["messages"]), True, training_args)
    if isinstance(row.get("prompt"), list):
        turns = row["prompt"] + row["completion"]
        return _turns(turns, len(row["prompt"]), on_prompt, training_args)
    if "prompt" in row:
        prompt = Text("prompt", row["prompt"], on_prompt, can_merge=True)
        return [prompt, Text("completion", row["completion"], True)]
    name = training_args.dataset_text_field
    return [Text(name, row[name], True)]


def _turns(messages: list[Row], prompt_turns: int, on_prompt: bool, training_args) -> list[Text]:
    texts = []
    for number, message in enumerate(messages):
        has_loss = on_prompt or number >= prompt_turns
        if training_args.assistant_only_loss and message["role"] != "assistant":
            has_loss = False
        if message.get("weight") == 0:
            has_loss = False
        name = f"message {number} ({message['role']})"
        texts.append(Text(name, message.get("content") or "", has_loss))
    return texts


def _decoded(row: Row, tokenizer: Tokenizer) -> Tokens:
    text = ""
    losses = b""
    for part, has_loss in decoded_parts(row, tokenizer):
        words = _without_spaces(part)
        text += words
        losses += bytes([has_loss]) * len(words)
    return Tokens(text, losses)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _fault(texts: list[Text], tokens: Tokens, tokenizer: Tokenizer) -> str | Text | None:
    """In words, the first text with a wrong loss; else the first Text that is not there."""
    lost = None
    cursor = 0
    for text in texts:
        found, where = _find(text, tokens, cursor, tokenizer)
        if found is None:
            lost = lost or text
        elif not found:
            return f"{text.name} has no loss on all of it" if text.has_loss else f"{text.name} has a loss"
        else:
            cursor = where
    return lost


def _find(text: Text, tokens: Tokens, cursor: int, tokenizer) -> tuple[bool | None, int]:
    """(whether the text is there with its loss, None where it is not there; its end)."""
    is_there = None
    for needle in _spellings(text.text, tokenizer):
        at = tokens.text.find(needle, cursor)
        while at >= 0:
            is_there = False
            stop = at + len(needle)
            if _has_its_loss(text, tokens.losses[at:stop]):
                return True, stop
            at = tokens.text.find(needle, at + 1)
        if is_there is not None:
            break
    return is_there, cursor


def _has_its_loss(text: Text, losses: bytes) -> bool:
    if text.has_loss:
        return 0 not in losses
    certain = losses[:-MERGED] if text.can_merge else losses
    return 1 not in certain


def _spellings(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """As it is; as the tokenizer spells it (some change Unicode's forms); as an earlier turn without its thoughts."""
    yield _without_spaces(text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    again = _without_spaces(tokenizer.decode(ids))
    unknown = tokenizer.unk_token
    if unknown is None or again.count(unknown) == text.count(unknown):
        yield again
    if END_OF_THOUGHT in text:
        yield _without_spaces(text.rpartition(END_OF_THOUGHT)[2])


def unread_by_template(rows: Dataset, tokenizer: Tokenizer) -> list[str]:
    """Keys of the compared rows' turns, and the column `tools`, that the chat template does not mention."""
    template: Any = tokenizer.chat_template or ""
    if not isinstance(template, str):  # several by name
        template = " ".join(template.values())
    names = ["tools"] if "tools" in rows.column_names else []
    compared = rows.select(_spread(len(rows), COMPARED_ROWS))
    for column in ("messages", "prompt", "completion"):
        if column in rows.column_names:
            for turns in compared[column]:
                if isinstance(turns, list):
                    names += chain.from_iterable(turns)
    distinct = dict.fromkeys(names)
    return [name for name in distinct if name != "weight" and name not in template]
