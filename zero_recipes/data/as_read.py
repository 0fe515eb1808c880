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
from datasets import Dataset, Features, Json, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.core.findings import refusal
from zero_recipes.data.audit import tables as arrow_tables
from zero_recipes.data.forms import TURNS, Row, Rows, code_digest, column_names, tables
from zero_recipes.data.thoughts import (
    KEEP,
    MASK_EMPTY,
    THINK,
    Tags,
    block_at_start,
    ends_with_empty_block,
    fields_with_thoughts,
    tags_around,
    tags_of_empty_block,
    turns_without_thoughts,
    unclosed_tag,
    without_block,
    without_fields,
)

# texts that no template changes, and that none writes by itself
NAME = "zr_name"
KEY = "zr_key"
VALUE = "zr value"
QUESTION = "zr question"
THOUGHT = "zr thought"
ANSWER = "zr answer"


class Splits(NamedTuple):
    """Which contents must be split into thoughts and answer, for the template does not do it."""

    tagged: bool  # a content that begins with both tags
    closed: bool  # a content that has the closing one alone


class Reads(NamedTuple):
    """What a chat template reads of an assistant's message."""

    nested_as_text: bool  # arguments in tool_calls[].function: as JSON text; else as a mapping
    flat_as_text: bool  # arguments in tool_calls[]
    thoughts: tuple[str, ...]  # the fields of a message whose thoughts it writes
    tags: Tags | None  # of the blocks of thoughts that it writes; None where it writes none that has tags of its own
    splits: dict[Tags, Splits]  # by the tags that a content may have
    keeping: dict[str, bool]  # the switch with which it writes the thoughts of earlier answers too; empty without one

    @property
    def tag_pattern(self) -> str:
        """A regular expression of any tag that a content may have."""
        return "|".join(tags.pattern for tags in self.splits)

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: str | None = None) -> "Reads":
        """Find what a chat template reads by rendering probes with it. `chat_template`: None for the tokenizer's."""
        probe = _Probe(tokenizer, chat_template)
        fields = tuple(name for name in tables()["thoughts"] if probe.writes_thoughts_of(name))
        field = fields[0] if fields else None
        tags = probe.tags(field)
        splits = {}
        for pair in dict.fromkeys([THINK, tags or THINK]):
            tagged = f"{pair.opened}\n{THOUGHT}\n{pair.closed}\n\n{ANSWER}"
            splits[pair] = Splits(
                field is not None and probe.needs_split(tagged, field, pair),
                field is not None and probe.needs_split(tagged.removeprefix(pair.opened), field, pair),
            )
        as_text = (probe.wants_text(nested=True), probe.wants_text(nested=False))
        keeping = {} if field is None else probe.switch_that_keeps(field)
        return cls(*as_text, fields, tags, splits, keeping)


class _Probe(NamedTuple):
    tokenizer: Tokenizer
    chat_template: str | None

    def render(self, turns: list[Row], **options: Any) -> str | None:
        """The conversation as text; None where the template stops."""
        options |= {"tokenize": False, "chat_template": self.chat_template}
        try:
            return self.tokenizer.apply_chat_template(turns, **options)
        except Exception:  # templates and Jinja raise whatever they like
            return None

    def answer(self, message: Row) -> str | None:
        """What stands behind the question, rendered, with this assistant's message; None where the template stops."""
        text = self.render([{"role": "user", "content": QUESTION}, {"role": "assistant", **message}])
        return None if text is None else text.rpartition(QUESTION)[2]

    def switches(self) -> list[str]:
        """The names in the template that have "think" in them: `enable_thinking`, `clear_thinking` and others."""
        template: Any = self.chat_template or self.tokenizer.chat_template
        if not isinstance(template, str):  # several by name
            return []
        return list(dict.fromkeys(re.findall(r"\w*think\w*", template)))

    def switch_that_keeps(self, field: str) -> dict[str, bool]:
        """What makes the template write the thoughts of earlier answers; empty where it does, or nothing does."""
        question = {"role": "user", "content": QUESTION}
        first = {"role": "assistant", "content": ANSWER, field: THOUGHT}
        turns = [question, first, question, {"role": "assistant", "content": ANSWER}]
        if THOUGHT in (self.render(turns) or THOUGHT):
            return {}
        for name in self.switches():
            for value in (True, False):
                if THOUGHT in (self.render(turns, **{name: value}) or ""):
                    return {name: value}
        return {}

    def switch_that_ends(self, tags: Tags) -> dict[str, bool]:
        """What makes a prompt end with an empty block of thoughts; empty where nothing does."""
        turns = [{"role": "user", "content": QUESTION}]
        for name in self.switches():
            text = self.render(turns, add_generation_prompt=True, **{name: False})
            if text is not None and ends_with_empty_block(text, tags):
                return {name: False}
        return {}

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

    def tags(self, field: str | None) -> Tags | None:
        """The tags of the template's blocks of thoughts. `field`: that it reads thoughts of."""
        without = self.answer({"content": ANSWER}) or ""
        if field is None:
            return tags_of_empty_block(ANSWER, without)
        return tags_around(THOUGHT, ANSWER, self.answer({"content": ANSWER, field: THOUGHT}) or "", without)

    def needs_split(self, content: str, field: str, tags: Tags) -> bool:
        """Whether the template writes a field's thoughts in an answer, and those of the content beside other tags."""
        in_field = self.answer({"content": ANSWER, field: THOUGHT}) or ""
        as_is = self.answer({"content": content}) or ""
        if THOUGHT not in in_field:
            return False
        return THOUGHT not in as_is or re.findall(tags.pattern, as_is) != re.findall(tags.pattern, in_field)


def without_thinking(tokenizer: Tokenizer) -> dict[str, bool]:
    """What the chat template is given so that an answer begins behind an empty block of thoughts; else nothing.

    Found by trying each switch whose name has "think" in it (`enable_thinking` of Qwen3, `thinking` of DeepSeek-V3.1).
    """
    tags = Reads.of(tokenizer).tags
    return {} if tags is None else _Probe(tokenizer, None).switch_that_ends(tags)


def as_read(rows: Rows, reads: Reads, thinking: str = MASK_EMPTY, processes: int | None = None) -> Rows:
    """The rows with each message as the chat template reads it. Raises Refusal, with row and turn.

    `reads`: what the template reads. `thinking`: the recipe's. `processes`: that do it.
    """
    columns = [name for name in ("messages", "prompt", "completion") if name in column_names(rows)]
    if not columns:
        return rows
    how = {}
    changes_tools = "tools" in column_names(rows)
    if isinstance(rows, Dataset):
        changes_tools = changes_tools and any(tools != _tools_as_read(tools) for tools in rows["tools"])
        if not changes_tools and not _has_something_to_read(rows, columns, reads):
            return rows
        how["num_proc"] = processes
    features = None
    if rows.features is not None:
        columns_of_turns = [name for name in columns if not isinstance(rows.features[name], Value)]
        features = Features({**rows.features, **dict.fromkeys(columns_of_turns, TURNS)})
        if changes_tools:
            features["tools"] = Value("string")
        if thinking == KEEP and reads.keeping:
            features["chat_template_kwargs"] = Json()
    keywords = {"columns": columns, "reads": reads, "thinking": thinking, "code": code_digest()}
    keywords["changes_tools"] = changes_tools
    return rows.map(_row_as_read, with_indices=True, fn_kwargs=keywords, features=features, **how)


def _has_something_to_read(rows: Dataset, columns: list[str], reads: Reads) -> bool:
    """Whether any row may have tool calls or thoughts. Looks at Arrow's texts: no message becomes a Python object."""
    words = ["tool_calls"]
    words += [f'"{name}"' for name in tables()["thoughts"]]
    for tags in reads.splits:
        words.append(re.escape(tags.closed.strip("<[◁/>]▷")))  # JSON may escape the rest
    pattern = "|".join(words)
    for name in columns:
        if not pa.types.is_nested(rows.data.schema.field(name).type):  # texts
            continue
        for table in arrow_tables(rows, [name]):
            messages = pc.list_flatten(table[name].combine_chunks())
            if isinstance(messages, pa.ExtensionArray):  # JSON
                messages = messages.storage
            if not (pa.types.is_string(messages.type) or pa.types.is_large_string(messages.type)):  # structs
                return True
            if pc.any(pc.match_substring_regex(messages, pattern)).as_py():
                return True
    return False


def _row_as_read(
    row: Row, number: int, columns: list[str], reads: Reads, thinking: str, changes_tools: bool, code: str
) -> Row:
    """`code`: for the cache (`code_digest`)."""
    found = {}
    parts = [name for name in columns if isinstance(row[name], list)]
    turns = []  # of the whole row, whose prompt and completion are one conversation
    for name in parts:
        turns += row[name]
    read = messages_as_read(turns, reads, number, thinking)
    for name in parts:
        count = len(row[name])
        found[name] = read[:count]
        read = read[count:]
    if changes_tools:
        tools = _tools_as_read(row["tools"])
        found["tools"] = None if tools is None else json.dumps(tools, ensure_ascii=False)
    if thinking == KEEP and reads.keeping:
        found["chat_template_kwargs"] = reads.keeping | (row.get("chat_template_kwargs") or {})
    return found


def messages_as_read(messages: list[Row], reads: Reads, row: int, thinking: str = MASK_EMPTY) -> list[Row]:
    """The messages of one row as the chat template reads them. Raises Refusal."""
    drops = turns_without_thoughts(messages, thinking)
    return [_message_as_read(turn, reads, row, at, at in drops) for at, turn in enumerate(messages)]


def _message_as_read(message: Row, reads: Reads, row: int, turn: int, drops_thoughts: bool) -> Row:
    if message["role"] != "assistant":
        return message
    message = dict(message)
    if message.get("tool_calls"):
        message["tool_calls"] = _calls_as_read(message["tool_calls"], reads, row, turn)
    if reads.thoughts or drops_thoughts:
        _with_one_block(message, reads, row, turn)
    if drops_thoughts:
        _without_thoughts(message, reads)
    elif reads.thoughts:
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


def _tools_as_read(tools: Any) -> Any:
    """A row's tools, each a mapping, with its parameters as one: templates would write JSON text once more as text.

    Text that is no JSON stays as it is. Templates, or the tokenizer, refuse it.
    """
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = _json_or_same(tools)
    if not isinstance(tools, list):
        return tools
    return [_tool_as_read(_json_or_same(tool)) for tool in tools]


def _tool_as_read(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    found = dict(tool)
    if isinstance(found.get("function"), Mapping):
        found["function"] = _tool_as_read(found["function"])
    if "parameters" in found:
        found["parameters"] = _json_or_same(found["parameters"])
    return found


def _json_or_same(value: Any) -> Any:
    """A list or a mapping that a text holds as JSON; else the value."""
    if not isinstance(value, str):
        return value
    try:
        found = _json(value)
    except ValueError:
        return value
    return found if isinstance(found, list | dict) else value


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


def _with_one_block(message: Row, reads: Reads, row: int, turn: int) -> None:
    """Take the same thoughts out of the content that a field has too. Raises Refusal where it is not clear."""
    content = message.get("content")
    tag = unclosed_tag(content, reads.splits)
    if tag is not None:
        raise refusal("ZR585", row=row, turn=turn, tag=tag)
    fields = fields_with_thoughts(message)
    if not fields:
        return
    places = {text.strip(): name for name, text in fields.items()}
    block = block_at_start(content, reads.splits)
    if block is not None and block.has_opening_tag:
        if block.thoughts.strip():
            places.setdefault(block.thoughts.strip(), "content")
        without_block(message, block)
    if len(places) > 1:
        raise refusal("ZR586", row=row, turn=turn, places=" and ".join(places.values()))


def _without_thoughts(message: Row, reads: Reads) -> None:
    without_fields(message)
    block = block_at_start(message.get("content"), reads.splits)
    if block is not None:
        without_block(message, block)


def _move_thoughts(message: Row, reads: Reads) -> None:
    """Into one field that the template reads."""
    fields = fields_with_thoughts(message)
    if fields:
        read = [name for name in fields if name in reads.thoughts]
        field = read[0] if read else reads.thoughts[0]
        thoughts = next(iter(fields.values()))
        without_fields(message)
        message[field] = thoughts
        return
    content = message.get("content")
    for tags, splits in reads.splits.items():
        block = block_at_start(content, [tags])
        if block is None:
            continue
        without_fields(message)  # blank ones, for which a template would not look at the content
        if splits.tagged if block.has_opening_tag else splits.closed:
            message[reads.thoughts[0]] = block.thoughts
            message["content"] = content[block.answer_at :]
            message["content_as_written"] = content  # whose characters `silent_parts` counts
        return
