"""Tokens and labels of rows, before they are truncated and packed: which tokens have a loss.

TRL tokenizes and masks. It lacks masks of the assistant's turns for chat templates without `{% generation %}`, turns
and parts of turns of `weight: 0`, empty blocks of thoughts, and markers that a text and the tokenizer both write.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.host import Host
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.data.as_read import Reads, as_read
from zero_recipes.data.audit import NO_KEYS, RowKeys, token_batches
from zero_recipes.data.forms import PROMPT_TURNS, Row, Rows, code_digest, column_names
from zero_recipes.data.thoughts import KEEP, Tags, empty_blocks, fields_with_thoughts, without_block_at_end
from zero_recipes.engine import huggingface

ROWS_OF_A_WORKER = 4000  # at least: 2 s of work; workers take 0.2 s to start for each of TRL's five steps
ANSWER = "zero recipes"  # a text that no template changes
NO_LOSS = -100
SHOWN_ROLES = 6


def tokenise(rows: Rows, tokenizer: Tokenizer, training_args, ours: RowKeys = NO_KEYS, split: str = "the data") -> Rows:
    """Make input_ids and labels of each row, before truncation, dropping, packing and shuffling.

    By the code that SFTTrainer trains with. `tokenizer`: with the chat template applied. `split`: for people.
    Raises Refusal.
    """
    tokenised = tokenise_as_written(rows, tokenizer, training_args, ours, split)
    return with_single_markers(rows, tokenised, tokenizer)[0]


def tokenise_as_written(
    rows: Rows, tokenizer: Tokenizer, training_args, ours: RowKeys, split: str = "the data"
) -> Rows:
    """Do the work of `tokenise`, but leave markers that stand twice. Raises Refusal."""
    whole = copy.copy(training_args)
    whole.max_length = None
    whole.shuffle_dataset = False
    if isinstance(rows, Dataset):
        whole.dataset_num_proc = workers(len(rows), training_args.dataset_num_proc)
    how = mask_by(rows, tokenizer, whole, ours.assistant_mask)
    template = None
    reads = None
    if has_turns(rows):
        if how is None:
            template = huggingface.training_template(tokenizer, whole)
        reads = Reads.of(tokenizer, template)
        rows = as_read(rows, reads, ours.thinking, whole.dataset_num_proc)
    if not isinstance(rows, Dataset):
        keywords = {"tokenizer": tokenizer, "chat_template": template, "split": split, "code": code_digest()}
        rows = rows.map(_refuse_if_template_stops, with_indices=True, fn_kwargs=keywords)
    with _template_errors_with_rows(rows, tokenizer, template, split):
        if how is not None:
            rows = _with_masks(rows, how, reads, tokenizer, whole)
        rows = huggingface.prepare_dataset(rows, tokenizer, whole, packing=False)
        if reads is None:
            return rows
        return _silenced(rows, template, reads, ours, tokenizer, whole)


def has_turns(rows: Rows) -> bool:
    """Whether the rows are conversations, which a chat template writes."""
    names = column_names(rows)
    if "input_ids" in names:
        return False
    columns = [name for name in ("messages", "prompt") if name in names]
    if rows.features is not None:
        return any(not isinstance(rows.features[name], Value) for name in columns)
    first = next(iter(rows))
    return any(isinstance(first[name], list) for name in columns)


# what a chat template raises


@contextlib.contextmanager
def _template_errors_with_rows(rows: Rows, tokenizer: Tokenizer, template: str | None, split: str) -> Iterator[None]:
    """An error of a chat template, while `rows` are tokenized, becomes a Refusal that names the row and the message.

    Of a stream the rows are tokenized later, and each is looked at then.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        is_of_library = not isinstance(error, Refusal) or error.codes == ["ZR199"]
        if is_of_library and isinstance(rows, Dataset):
            for number, row in enumerate(rows):
                _refuse_if_template_stops(row, number, tokenizer, template, split)
        raise


def _refuse_if_template_stops(
    row: Row, number: int, tokenizer: Tokenizer, chat_template: str | None, split: str, code: str = ""
) -> Row:
    """The row, if the chat template can write it. `code`: for the cache (`code_digest`)."""
    if not isinstance(row.get("messages") or row.get("prompt"), list):
        return row
    place = f"row {number} of {split}"
    with library_error_as_finding(f"reading the tools of {place}"):
        chat = Chat.of_row(row, tokenizer, chat_template)
    if chat.prompt_turns:
        _render_or_refuse(chat, chat.messages[: chat.prompt_turns], place, to_answer=True)
    _render_or_refuse(chat, chat.messages, place)
    return row


def _render_or_refuse(chat: "Chat", messages: list[Row], place: str, to_answer: bool = False) -> str:
    """The messages as text. Raises Refusal with the first message from which on the template stops."""
    try:
        return chat.render(messages, to_answer)
    except MemoryError:
        raise
    except Exception as error:
        count = len(messages)
        while count > 1 and _stops(chat, messages[: count - 1]):
            count -= 1
        if count == 1 < len(messages):  # no message alone is at fault: a user's turn is missing, or the first is wrong
            roles = [message["role"] for message in messages]
            whose = f" (roles: {', '.join(roles[:SHOWN_ROLES])}{', ...' if len(roles) > SHOWN_ROLES else ''})"
        else:
            whose = f", message {count - 1} ({messages[count - 1]['role']}),"
        with library_error_as_finding(f"writing {place}{whose} with the chat template"):
            raise error


def _stops(chat: "Chat", messages: list[Row]) -> bool:
    try:
        chat.render(messages)
    except Exception:  # templates and Jinja raise whatever they like
        return True
    return False


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


def _with_masks(rows: Rows, how: str, reads: Reads, tokenizer: Tokenizer, training_args) -> Rows:
    """The rows with input_ids and assistant_masks. Raises Refusal."""
    with library_error_as_finding("masking all but the assistant's tokens"):
        keywords = {"end": _end_of_turn(tokenizer), "how": how, "reads": reads, "tokenizer": tokenizer}
        keywords["code"] = code_digest()
        keywords["only_completion"] = training_args.completion_only_loss is not False
        return rows.map(_masked, with_indices=True, fn_kwargs=keywords, **_in_parallel(rows, training_args))


def _masked(
    row: Row, number: int, end: str, how: str, reads: Reads, only_completion: bool, tokenizer, code: str
) -> Row:
    """`code`: for the cache (`code_digest`)."""
    chat = Chat.of_row(row, tokenizer)
    text = chat.render(chat.messages)
    first = chat.prompt_turns if only_completion else 0
    spans = []
    for at in range(first, len(chat.messages)):
        if chat.messages[at]["role"] == "assistant":
            start, stop = _span(chat, text, at, end, number, reads.tags)
            if how == "answer":
                start = _start_of_answer(chat.messages[at], text, start, stop, reads.tags)
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
        """The conversation of a converted row. `chat_template`: None for the tokenizer's own."""
        prompt = row.get("prompt") or []
        messages = prompt + row["completion"] if prompt else row["messages"]
        tools = row.get("tools")
        if isinstance(tools, str):
            tools = json.loads(tools)
        options = {"tools": tools, "chat_template": chat_template}
        options |= row.get("chat_template_kwargs") or {}
        return cls(messages, len(prompt) or row.get(PROMPT_TURNS) or 0, options, tokenizer)

    def render(self, messages: list[Row], to_answer: bool = False) -> str:
        """Write the messages as text with the chat template; `to_answer`: with the generation prompt."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_answer, **self.options
        )


def _span(chat: Chat, text: str, at: int, end: str, row: int, tags: Tags | None) -> tuple[int, int]:
    """Where message `at` stands in the rendered conversation: after its header, up to and with the token that ends it.

    Raises Refusal where the template writes earlier messages otherwise once it follows.
    """
    message = chat.messages[at]
    to_answer = message["role"] == "assistant"
    if at == 0:  # there is nothing to render before it
        start = _end_of_header(chat, text) if to_answer else 0
    else:
        before = _render_or_refuse(chat, chat.messages[:at], f"row {row} up to message {at}", to_answer)
        if not text.startswith(before) and tags is not None:  # a prompt may open a block that the answer lacks
            before = without_block_at_end(before, tags)
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


def _start_of_answer(message: Row, text: str, start: int, stop: int, tags: Tags | None) -> int:
    """Where the thoughts begin, with their tag, else the content. `text`: of which start to stop is the turn."""
    for thoughts in fields_with_thoughts(message).values():
        at = text.find(thoughts.strip(), start, stop)
        if at >= 0:
            opening = "" if tags is None else re.escape(tags.opened)
            return re.compile(rf"(?:{opening}\s*)?\Z").search(text, start, at).start()
    if not isinstance(message.get("content"), str):
        return start
    return max(start, text.find(message["content"].strip(), start, stop))


def _next_turn(text: str, stop: int) -> int:
    """Behind the line breaks that the template writes after a turn."""
    return len(text) - len(text[stop:].lstrip())


def _tokens_inside(
    text: str,
    spans: list[tuple[int, int]],
    tokenizer,
    parts: list[tuple[int, int]] | None = None,
    blocks: list[tuple[int, int]] | None = None,
) -> tuple[list[int], list[int]]:
    """(the text's token ids, 1 for each token of which a character is inside one of the spans).

    `parts`: spans that a token is not inside of if it shares spaces alone with it: " train" of "not this. train this"
    is of the second part, whichever has the space. `blocks`: spans that have all of a token but spaces.
    """
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(tokens["offset_mapping"]).reshape(-1, 2)
    inside = np.zeros(len(offsets), dtype=np.int64)
    for start, stop in spans:
        inside[(offsets[:, 0] < stop) & (start < offsets[:, 1])] = 1
    for start, stop in parts or []:
        for token in np.flatnonzero((offsets[:, 0] < stop) & (start < offsets[:, 1])):
            first, last = offsets[token]
            shared = text[max(first, start) : min(last, stop)]
            if shared.strip() or (start <= first and last <= stop):
                inside[token] = 1
    for start, stop in blocks or []:
        for token in np.flatnonzero((offsets[:, 0] < stop) & (start < offsets[:, 1])):
            first, last = offsets[token]
            beyond = text[first : max(first, start)] + text[min(last, stop) : last]
            shared = text[max(first, start) : min(last, stop)]
            if not beyond.strip() and (shared.strip() or not beyond):
                inside[token] = 1
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


# turns of weight 0, their parts, and empty blocks of thoughts


def _silenced(
    rows: Rows, template: str | None, reads: Reads, ours: RowKeys, tokenizer: Tokenizer, training_args
) -> Rows:
    """Tokenized rows, with no loss on the turns and the parts of `weight: 0`, and on empty blocks of thoughts.

    `template`: which they are rendered by, if it is not the tokenizer's own. `reads`: of it. Raises Refusal.
    """
    columns = [name for name in ("messages", "prompt", "completion") if name in column_names(rows)]
    if not columns:
        return rows
    masks_blocks = reads.tags is not None and ours.thinking != KEEP
    is_looked_at = masks_blocks or not isinstance(rows, Dataset) or PROMPT_TURNS in column_names(rows)
    if not is_looked_at and not any(map(_says_what_is_silent, rows.select_columns(columns))):
        return rows
    with library_error_as_finding("leaving parts of the rows without a loss"):
        keywords = {"tokenizer": tokenizer, "chat_template": template, "code": code_digest()}
        keywords |= {"reads": reads, "masks_blocks": masks_blocks}
        keywords["only_completion"] = training_args.completion_only_loss is not False
        keywords["assistant_only"] = bool(training_args.assistant_only_loss)
        return rows.map(_silence, with_indices=True, fn_kwargs=keywords, **_in_parallel(rows, training_args))


def _messages(row: Row) -> list[Row]:
    """Of the whole conversation; empty for a row of texts."""
    if isinstance(row.get("prompt"), list):
        return row["prompt"] + row["completion"]
    return row.get("messages") or []


def _says_what_is_silent(row: Row) -> bool:
    return any(message.get("weight") == 0 or message.get("silent_parts") for message in _messages(row))


def _silence(
    row: Row,
    number: int,
    tokenizer: Tokenizer,
    chat_template: str | None,
    reads: Reads,
    masks_blocks: bool,
    only_completion: bool,
    assistant_only: bool,
    code: str,
) -> Row:
    """`only_completion`, `assistant_only`: what has no loss anyway. `code`: for the cache (`code_digest`)."""
    silent_prompt = only_completion and row.get(PROMPT_TURNS)
    is_silent = _says_what_is_silent(row) or silent_prompt
    if not _messages(row) or not (is_silent or masks_blocks):
        return {"labels": row["labels"]}
    chat = Chat.of_row(row, tokenizer, chat_template)
    text = chat.render(chat.messages)
    blocks = empty_blocks(text, chat.messages, reads.tags, chat.render) if masks_blocks else []
    if not (is_silent or blocks):
        return {"labels": row["labels"]}
    end = _end_of_turn(tokenizer) if is_silent else ""
    spans = []
    parts = []
    if silent_prompt:  # with the header of the answer, as TRL masks a prompt
        start, _ = _span(chat, text, chat.prompt_turns, end, number, reads.tags)
        spans.append((0, start))
    for at, message in enumerate(chat.messages):
        has_no_loss = only_completion and at < chat.prompt_turns
        if assistant_only and message["role"] != "assistant":
            has_no_loss = True
        if message.get("weight") == 0:
            start, stop = _span(chat, text, at, end, number, reads.tags)
            spans.append((start, _next_turn(text, stop)))
        elif message.get("silent_parts") and not has_no_loss:
            start, stop = _span(chat, text, at, end, number, reads.tags)
            for first, last, part in message["silent_parts"]:
                found = _places_of_part(message, text, (start, stop), first, last, reads)
                if found is None:
                    raise refusal("ZR577", row=number, turn=at, part=part)
                parts += found
    ids, inside = _tokens_inside(text, spans, tokenizer, parts, blocks)
    if ids != row["input_ids"]:
        raise ValueError(f"row {number}: its tokens are not those of its text")
    labels = np.where(inside, NO_LOSS, row["labels"])
    return {"labels": labels.tolist()}


def _places_of_part(
    message: Row, text: str, turn: tuple[int, int], first: int, last: int, reads: Reads
) -> list[tuple[int, int]] | None:
    """Where characters `first` to `last` of a content stand in the `text`; None where that is not certain.

    `turn`: where its turn begins and ends. A template may trim a content, and write its thoughts elsewhere. Tags of
    thoughts belong to the part that has them.
    """
    content = message.get("content_as_written", message["content"])
    start_of_turn, end_of_turn = turn
    tag = reads.tag_pattern
    placed = _placed(content, text[start_of_turn:end_of_turn], tag)
    if placed is None:
        return None
    found = []
    for offset, piece, at_in_turn in placed:
        at = start_of_turn + at_in_turn
        begin = max(first, offset)
        finish = min(last, offset + len(piece))
        if begin >= finish:
            continue
        start = at + begin - offset
        stop = at + finish - offset
        if re.search(tag, content[first:begin]):
            tags_before = re.compile(rf"(?:(?:{tag})\s*)*\Z")
            start = tags_before.search(text, 0, start).start()  # a prompt to answer may have them, before the turn
        if re.search(tag, content[finish:last]):
            stop = re.compile(rf"(?:\s*(?:{tag}))*").match(text, stop).end()
        found.append((start, stop))
    return found


def _placed(content: str, text: str, tag: str) -> list[tuple[int, str, int]] | None:
    """Pieces of a content as (where it begins there, the piece, where it begins in `text`): one, or those between tags.

    None where a piece is not there, or could be at several places. `tag`: a regular expression.
    """
    whole = content.strip()
    offset = content.find(whole)
    begins = len(text) - len(text.lstrip())
    if text.startswith(whole, begins):
        return [(offset, whole, begins)]
    if text.count(whole) == 1:
        return [(offset, whole, text.find(whole))]
    placed = []
    cursor = 0
    offset = 0
    for written in re.split(tag, content):
        piece = written.strip()
        if piece:
            at = text.find(piece, cursor)
            follows = re.compile(rf"(?:\s|{tag})*").fullmatch(text, cursor, at) is not None
            if at < 0 or (not follows and text.count(piece, cursor) > 1):
                return None
            placed.append((content.find(piece, offset), piece, at))
            cursor = at + len(piece)
        offset += len(written)
        found = re.compile(tag).match(content, offset)
        offset += len(found[0]) if found else 0
    return placed


# markers that are there twice


def with_single_markers(rows: Rows, tokenised: Rows, tokenizer: Tokenizer) -> tuple[Rows, list[int]]:
    """The tokenised rows with the beginning and the end of a text once, and the numbers of those that had two.

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
    markers = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "code": code_digest()}
    return tokenised.map(_keep_one, fn_kwargs=markers), doubled


def without_beginning(text: str, tokenizer: Tokenizer) -> str:
    """A text without the marker of its beginning, where the tokenizer adds one."""
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


def _keep_one(row: Row, bos: int | None, eos: int | None, code: str) -> Row:
    """`code`: for the cache (`code_digest`)."""
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    labels = np.asarray(row["labels"], dtype=np.int64)
    again = _doubled(ids, bos, eos)
    for at in np.flatnonzero(again)[::-1]:  # the one that stays has a loss if any of them has
        labels[at - 1] = max(labels[at - 1], labels[at])
    return {"input_ids": ids[~again].tolist(), "labels": labels[~again].tolist()}
