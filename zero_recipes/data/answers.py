"""What the rows say, before they are tokens: answers that are missing or empty, and rows of unusual length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from zero_recipes.data.columns import BATCH

NO_ANSWER = -1
LONG = 1_000_000  # characters of one row that take a tokenizer seconds


def answer_lengths(rows: Dataset, text_field: str) -> np.ndarray | None:
    """For each row the characters of its longest answer without blanks around it, NO_ANSWER for a chat in which the
    assistant has no turn; of plain texts the text's. None where the rows are token ids."""
    names = rows.column_names
    if "input_ids" in names:
        return None
    if "completion" in names:
        return _lengths(rows, "completion", anyone=True)
    column = next((name for name in ("messages", "conversations", text_field) if name in names), None)
    return None if column is None else _lengths(rows, column)


def longest_row(rows: Dataset, columns: list[str]) -> tuple[int, int]:
    """(row, characters) of the longest text in these columns, a chat's messages together."""
    sizes = sum(np.maximum(_lengths(rows, name, anyone=True, total=True), 0) for name in columns)
    return int(sizes.argmax()), int(sizes.max())


def _lengths(rows: Dataset, column: str, anyone: bool = False, total: bool = False) -> np.ndarray:
    parts = []
    if "Json" in repr(rows.features[column]):
        return np.array([_length_of(value, anyone, total) for value in rows.with_format(None)[column]])
    for batch in rows.select_columns([column]).with_format("arrow").iter(BATCH):
        values = batch[column].combine_chunks()
        lengths = _text_lengths(values) if _is_text(values.type) else _chat_lengths(values, anyone, total)
        parts.append(
            np.array([_length_of(v, anyone, total) for v in values.to_pylist()]) if lengths is None else lengths
        )
    return np.concatenate(parts)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _text_lengths(values: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.utf8_length(pc.utf8_trim_whitespace(values)), 0).to_numpy(zero_copy_only=False)


def _chat_lengths(values: pa.Array, anyone: bool, total: bool) -> np.ndarray | None:
    """None where the messages are not plain role and content."""
    flat = pc.list_flatten(values) if pa.types.is_list(values.type) else None
    if flat is None or not pa.types.is_struct(flat.type):
        return None
    names = [field.name for field in flat.type]
    role, content = ("from", "value") if "from" in names else ("role", "content")
    if "tool_calls" in names or not {role, content} <= set(names) or not _is_text(flat.type.field(content).type):
        return None
    lengths, parents = _text_lengths(pc.struct_field(flat, content)), np.asarray(pc.list_parent_indices(values))
    found = np.full(len(values), NO_ANSWER)
    if not anyone:
        assistants = pc.fill_null(pc.equal(pc.struct_field(flat, role), "assistant"), False)
        counted = assistants.to_numpy(zero_copy_only=False)
        lengths, parents = lengths[counted], parents[counted]
    (np.add if total else np.maximum).at(found, parents, lengths)
    return found


def _length_of(value: Any, anyone: bool, total: bool) -> int:
    if isinstance(value, str):
        return len(value.strip())
    found = [_said(message) for message in value or [] if anyone or _role(message) == "assistant"]
    return sum(found) if total else max(found, default=NO_ANSWER)


def _role(message: dict[str, Any]) -> Any:
    return message.get("role") or message.get("from")


def _said(message: dict[str, Any]) -> int:
    content = message.get("content") or message.get("value") or message.get("tool_calls") or ""
    return len(content.strip() if isinstance(content, str) else str(content))


def roles_in(row: dict[str, Any]) -> Iterator[str]:
    """The roles of a chat's messages, each once."""
    messages = row.get("messages") or row.get("conversations") or []
    return iter(dict.fromkeys(str(_role(message)) for message in messages))
