"""Messages as a chat template reads them: tool calls' arguments as a mapping or as text, thoughts in the field it has.

Files write them in several ways, and each template reads one or two: others are written as `"{\"a\": 1}"`, stop the
template, or are left out. What a template reads is found by rendering probes with it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.core.findings import refusal
from zero_recipes.data.audit import tables as arrow_tables
from zero_recipes.data.forms import TURNS, Row, Rows, code_digest, column_names, tables

OPENED = "<think>"
CLOSED = "</think>"
TAG = re.compile(f"{OPENED}|{CLOSED}")
# texts that no template changes, and that none writes by itself
NAME = "zr_name"
KEY = "zr_key"
VALUE = "zr value"
THOUGHT = "zr thought"
ANSWER = "zr answer"


class Reads(NamedTuple):
    """What a chat template reads of an assistant's message."""

    nested_as_text: bool  # arguments in tool_calls[].function: as JSON text; else as a mapping
    flat_as_text: bool  # arguments in tool_calls[]
    thoughts: tuple[str, ...]  # the fields of a message whose thoughts it writes
    splits_tagged: bool  # a content that begins with `<think>...</think>` must be split, for the template does not
    splits_closed: bool  # a content that has `</think>` alone

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: str | None = None) -> "Reads":
        """Find what a chat template reads by rendering probes with it. `chat_template`: None for the tokenizer's."""
        probe = _Probe(tokenizer, chat_template)
        fields = tuple(name for name in tables()["thoughts"] if probe.writes_thoughts_of(name))
        tagged = f"{OPENED}\n{THOUGHT}\n{CLOSED}\n\n{ANSWER}"
        return cls(
            probe.wants_text(nested=True),
            probe.wants_text(nested=False),
            fields,
            bool(fields) and probe.needs_split(tagged, fields[0]),
            bool(fields) and probe.needs_split(tagged.removeprefix(OPENED), fields[0]),
        )


class _Probe(NamedTuple):
    tokenizer: Tokenizer
    chat_template: str | None

    def answer(self, message: Row) -> str | None:
        """A conversation with this assistant's message, rendered; None where the template stops."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", **message}]
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, chat_template=self.chat_template)
        except Exception:  # templates and Jinja raise whatever they like
            return None

    def call(self, arguments: Any, nested: bool, **keys: Any) -> str:
        """A tool call, rendered; empty where the template takes none."""
        call = {"name": NAME, "arguments": arguments}
        if nested:
            call = {"type": "function", "id": "call00000", "function": call}
        for content in ("", None):  # some templates want the one, some the other
            text = self.answer({"content": content, "tool_calls": [call], **keys})
            if text is not None and NAME in text:
                return text
        return ""

    def wants_text(self, nested: bool) -> bool:
        arguments = {KEY: VALUE}
        as_mapping = self.call(arguments, nested)
        if KEY in as_mapping and VALUE in as_mapping and str(arguments) not in as_mapping:
            return False
        as_text = json.dumps(arguments)
        return as_text in self.call(as_text, nested)

    def writes_thoughts_of(self, field: str) -> bool:
        text = self.answer({"content": ANSWER, field: THOUGHT}) or ""
        return THOUGHT in text or THOUGHT in self.call({KEY: VALUE}, nested=True, **{field: THOUGHT})

    def needs_split(self, content: str, field: str) -> bool:
        """Whether the template writes a field's thoughts in an answer, and those of the content beside other tags."""
        in_field = self.answer({"content": ANSWER, field: THOUGHT}) or ""
        as_is = self.answer({"content": content}) or ""
        if THOUGHT not in in_field:
            return False
        return THOUGHT not in as_is or TAG.findall(as_is) != TAG.findall(in_field)


def as_read(rows: Rows, tokenizer: Tokenizer, chat_template: str | None = None, processes: int | None = None) -> Rows:
    """The rows with each message as the chat template reads it. Raises Refusal, with row and turn.

    `chat_template`: None for the tokenizer's own. `processes`: that do it.
    """
    columns = [name for name in ("messages", "prompt", "completion") if name in column_names(rows)]
    if not columns:
        return rows
    how = {}
    if isinstance(rows, Dataset):
        if not _has_something_to_read(rows, columns):
            return rows
        how["num_proc"] = processes
    features = None
    if rows.features is not None:
        columns_of_turns = [name for name in columns if not isinstance(rows.features[name], Value)]
        features = Features({**rows.features, **dict.fromkeys(columns_of_turns, TURNS)})
    keywords = {"columns": columns, "reads": Reads.of(tokenizer, chat_template), "code": code_digest()}
    return rows.map(_row_as_read, with_indices=True, fn_kwargs=keywords, features=features, **how)


def _has_something_to_read(rows: Dataset, columns: list[str]) -> bool:
    """Whether any row may have tool calls or thoughts. Looks at Arrow's texts: no message becomes a Python object."""
    words = "|".join(["tool_calls", "think>", *(f'"{name}"' for name in tables()["thoughts"])])
    for name in columns:
        if not pa.types.is_nested(rows.data.schema.field(name).type):  # texts
            continue
        for table in arrow_tables(rows, [name]):
            messages = pc.list_flatten(table[name].combine_chunks())
            if isinstance(messages, pa.ExtensionArray):  # JSON
                messages = messages.storage
            if not (pa.types.is_string(messages.type) or pa.types.is_large_string(messages.type)):  # structs
                return True
            if pc.any(pc.match_substring_regex(messages, words)).as_py():
                return True
    return False


def _row_as_read(row: Row, number: int, columns: list[str], reads: Reads, code: str) -> Row:
    """`code`: for the cache (`code_digest`)."""
    found = {}
    first = 0  # of the row's messages, whose prompt and completion are one conversation
    for name in columns:
        if isinstance(row[name], list):
            found[name] = messages_as_read(row[name], reads, number, first)
            first += len(row[name])
    return found


def messages_as_read(messages: list[Row], reads: Reads, row: int, first: int = 0) -> list[Row]:
    """The messages of one row as the chat template reads them. Raises Refusal.

    `first`: the number of the first of these messages in its row.
    """
    return [_message_as_read(message, reads, row, first + number) for number, message in enumerate(messages)]


def _message_as_read(message: Row, reads: Reads, row: int, turn: int) -> Row:
    if message["role"] != "assistant":
        return message
    message = dict(message)
    if message.get("tool_calls"):
        message["tool_calls"] = _calls_as_read(message["tool_calls"], reads, row, turn)
    if reads.thoughts:
        _move_thoughts(message, reads)
    return message


# tool calls


def _calls_as_read(calls: Any, reads: Reads, row: int, turn: int) -> list[Row]:
    found = []
    try:
        if isinstance(calls, str):
            calls = _json(calls)
        if not isinstance(calls, list):
            raise ValueError("tool_calls is no list")
        for call in calls:
            found.append(_call_as_read(call, reads))
    except ValueError as error:
        raise refusal("ZR576", row=row, turn=turn, call=len(found), fault=error) from None
    return found


def _call_as_read(call: Any, reads: Reads) -> Row:
    """Raises ValueError."""
    if not isinstance(call, Mapping):
        raise ValueError(f"it is {call!r}, no mapping")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], reads.nested_as_text)}
    return _with_arguments(call, reads.flat_as_text)


def _with_arguments(function: Mapping[str, Any], as_text: bool) -> Row:
    """`arguments` as a mapping, or as the text of one. Raises ValueError for text of something else."""
    found = dict(function)
    if "arguments" not in function:
        return found
    arguments = mapping_of(function["arguments"])
    if not as_text:
        found["arguments"] = arguments
    elif not isinstance(function["arguments"], str) or not function["arguments"].strip():
        found["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return found


def mapping_of(arguments: Any) -> Any:
    """A tool call's arguments as a mapping. None and no text are no arguments.

    Raises ValueError for text that is no JSON object.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    found = _json(arguments)
    if not isinstance(found, dict):
        raise ValueError(f"its arguments are text that is no JSON object: {arguments[:80]!r}")
    return found


def _json(text: str) -> Any:
    """None where the text is no JSON, or would lose something: a key that stands twice, numbers that JSON lacks."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_unknown_number)
    except (ValueError, RecursionError):
        return None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _unknown_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# thoughts


def _move_thoughts(message: Row, reads: Reads) -> None:
    """Into the first field that the template reads."""
    field = reads.thoughts[0]
    own = [name for name in tables()["thoughts"] if isinstance(message.get(name), str)]
    if own:
        distinct = {message[name] for name in own}
        if len(distinct) == 1 and own[0] not in reads.thoughts:
            message[field] = message[own[0]]
        return
    content = message.get("content")
    if not isinstance(content, str):
        return
    needs_split = reads.splits_tagged if OPENED in content else reads.splits_closed
    split = split_thoughts(content) if needs_split else None
    if split is not None:
        thoughts, answer_at = split
        message[field] = thoughts
        message["content"] = content[answer_at:]
        message["content_as_written"] = content  # whose characters `silent_parts` counts


def split_thoughts(content: str) -> tuple[str, int] | None:
    """The thoughts with which a content begins, and where the answer begins; None where it is not so clear.

    A content may lack the tag that opens: some templates write it after the header.
    """
    tags = TAG.findall(content)
    if tags not in ([OPENED, CLOSED], [CLOSED]):
        return None
    before, _, answer = content.partition(CLOSED)
    head, opened, thoughts = before.rpartition(OPENED)
    if opened and head.strip():
        return None
    answer_at = len(content) - len(answer.lstrip("\n"))
    return thoughts.strip("\n"), answer_at
