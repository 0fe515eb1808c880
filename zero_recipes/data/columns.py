"""Columns that hold what they are to hold: texts, chats or token ids in every row, before anything is tokenised.

Sound columns cost a few passes of Arrow's; only one that is not, or that holds mixed JSON, is read row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from zero_recipes.core.findings import Finding, finding, first_line
from zero_recipes.data.source import Source, named

BATCH = 20_000  # rows in memory at a time
MASKS = ("labels", "attention_mask", "completion_mask", "assistant_masks", "position_ids")  # one entry a token

Fault = Callable[[Any], str | None]  # what is wrong with a value; None where nothing is


def text_fault(value: Any, optional: bool = False) -> str | None:
    if isinstance(value, str) or (optional and value is None):
        return None
    return f"holds {named(value)}, not text"


def chat_fault(messages: Any, role: str = "role", content: str = "content") -> str | None:
    """What is wrong with a chat; `role` and `content` are its messages' keys."""
    if not isinstance(messages, list):
        return f"holds {named(messages)}, not a list of messages"
    if not messages:
        return "is a chat without a message"
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"holds {named(message)} as message {number}, not an object with {role} and {content}"
        who, said = message.get(role), message.get(content)
        if not isinstance(who, str) or not who:
            return (
                f"has no {role} in message {number}" if not who else f"has {named(who)} as {role} of message {number}"
            )
        if said is None and not message.get("tool_calls"):
            return f"has no {content} in message {number} ({who})"
        if not isinstance(said, (str, list, type(None))):
            return f"has {named(said)} as {content} of message {number} ({who})"
    return None


OPTIONAL_TEXT: Fault = partial(text_fault, optional=True)
FROM_VALUE: Fault = partial(chat_fault, role="from", content="value")


def ids_fault(ids: Any) -> str | None:
    if not isinstance(ids, list):
        return f"holds {named(ids)}, not a list of token ids"
    if not ids:
        return "holds no token"
    odd = next((each for each in ids if type(each) is not int), 0)
    return None if type(odd) is int else f"holds {named(odd)} among its token ids"


def checks_of(first: dict[str, Any], text_field: str, alpaca: bool) -> dict[str, Fault] | None:
    """For each column that TRL reads of rows such as the first one, what finds a fault in one of its values.

    The same order of precedence as TRL's (trl/trainer/sft_trainer.py, `_prepare_dataset`). None where TRL reads none of
    these columns.
    """
    if alpaca:
        return {"instruction": text_fault, "input": OPTIONAL_TEXT, "output": text_fault}
    if "input_ids" in first:
        return {name: ids_fault for name in ("input_ids", *MASKS) if name in first}
    if {"prompt", "completion"} <= first.keys():
        chats = any(isinstance(first[name], list) for name in ("prompt", "completion"))
        return dict.fromkeys(("prompt", "completion"), chat_fault if chats else text_fault)
    if "messages" in first:
        return {"messages": chat_fault}
    if "conversations" in first:
        return {"conversations": FROM_VALUE}
    return {text_field: text_fault} if text_field in first else None


def column_findings(rows: Dataset, checks: dict[str, Fault], source: Source) -> Iterator[Finding]:
    """At most one finding for each column: its first row that TRL would stop on or train on wrongly, and how many."""
    broken = next(_invalid(rows, list(checks), source), None)
    if broken is not None:
        yield broken
        return
    every_value_sound = True
    for name, fault in checks.items():
        if fault is OPTIONAL_TEXT and source.is_csv:
            yield from _na_words(rows, name, source)
        bad = [] if _sound(rows, name, fault) else _bad_rows(rows, name, fault)
        if bad:
            every_value_sound = False
            yield value_finding(name, *bad[0], source, len(bad), len(rows))
    if "input_ids" in checks and every_value_sound:
        yield from _unequal_lengths(rows, checks, source)


def _invalid(rows: Dataset, names: list[str], source: Source) -> Iterator[Finding]:
    """Texts that are not UTF-8: pyarrow takes them from JSON as they are, and whoever reads them stops."""
    start = 0
    for batch in rows.select_columns(names).with_format("arrow").iter(BATCH):
        for name in names:
            try:
                batch[name].validate(full=True)
            except pa.ArrowInvalid as error:
                number = next(at for at in range(len(batch)) if not _is_valid(batch[name].slice(at, 1)))
                yield finding("ZR545", row=source.row(start + number), name=name, error=first_line(error))
        start += len(batch)


def _is_valid(value: pa.ChunkedArray) -> bool:
    try:
        pa.array(value.combine_chunks().to_pylist())
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return False
    return True


def _na_words(rows: Dataset, name: str, source: Source) -> Iterator[Finding]:
    """At most one finding: a cell of a column that may be empty, whose word pandas has taken for null."""
    nulls = set()
    start = 0
    for batch in rows.select_columns([name]).with_format("arrow").iter(BATCH):
        nulls.update((start + np.flatnonzero(batch[name].is_null())).tolist())
        start += len(batch)
    for number, cell in enumerate(source.cells(name) if nulls else ()):
        if cell and number in nulls:
            yield finding("ZR544", row=source.row(number), cell=cell, name=name)
            return


def value_finding(
    column: str, number: int, fault: str, source: Source, bad: int = 1, of: int | None = None, scope: str = "run"
) -> Finding:
    others = f"; {bad} of {of} rows are like it" if bad > 1 else ""
    na = " pandas takes an empty cell and the words NA, N/A, null and None of a CSV file for null." * source.is_csv
    return finding(
        "ZR524",
        row=source.row(number),
        column=column,
        fault=fault,
        others=others,
        na=na,
        fix=": JSON Lines keeps every word as it is." if source.is_csv else ".",
        scope=scope,
    )


def _sound(rows: Dataset, name: str, fault: Fault) -> bool:
    """True where Arrow's types and counts say that no value can have the fault."""
    kind = rows.data.schema.field(name).type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if "Json" in repr(rows.features[name]) or not (texts or pa.types.is_list(kind)):
        return False
    if fault is OPTIONAL_TEXT:
        return texts
    batches = (batch[name].combine_chunks() for batch in rows.select_columns([name]).with_format("arrow").iter(BATCH))
    if fault is text_fault:
        return texts and all(not batch.null_count for batch in batches)
    if texts:
        return False
    if fault is ids_fault:
        return all(map(_sound_ids, batches))
    return all(
        _sound_chats(batch, *(("from", "value") if fault is FROM_VALUE else ("role", "content"))) for batch in batches
    )


def _sound_ids(batch: pa.ListArray) -> bool:
    flat = pc.list_flatten(batch)
    shortest = pc.min(pc.list_value_length(batch)).as_py()
    return not batch.null_count and not flat.null_count and bool(shortest) and pa.types.is_integer(flat.type)


def _sound_chats(batch: pa.ListArray, role: str, content: str) -> bool:
    flat = pc.list_flatten(batch)
    if batch.null_count or not pc.min(pc.list_value_length(batch)).as_py() or not pa.types.is_struct(flat.type):
        return False
    if not {role, content} <= {field.name for field in flat.type}:
        return False
    parts = [pc.struct_field(flat, name) for name in (role, content)]
    texts = all(pa.types.is_string(part.type) and not part.null_count for part in parts)
    return texts and pc.min(pc.binary_length(parts[0])).as_py() > 0


def _bad_rows(rows: Dataset, name: str, fault: Fault) -> list[tuple[int, str]]:
    """(row, fault) of a column."""
    found = ((number, fault(value)) for number, value in enumerate(rows.with_format(None)[name]))
    return [(number, said) for number, said in found if said is not None]


def _unequal_lengths(rows: Dataset, checks: dict[str, Fault], source: Source) -> Iterator[Finding]:
    """Rows whose labels or masks do not have one entry for each token: TRL pairs them up to the shorter one's end."""
    names = list(checks)
    if not all(pa.types.is_list(rows.data.schema.field(name).type) for name in names):
        return
    start = 0
    for batch in rows.select_columns(names).with_format("arrow").iter(BATCH):
        length = pc.list_value_length(batch["input_ids"])
        for name in names[1:]:
            differ = pc.indices_nonzero(pc.fill_null(pc.not_equal(pc.list_value_length(batch[name]), length), False))
            if len(differ):
                at = differ[0].as_py()
                yield finding(
                    "ZR525",
                    row=source.row(start + at),
                    name=name,
                    number_of_batch=len(batch[name][at]),
                    number_of_input_ids=len(batch["input_ids"][at]),
                )
                return
        start += len(batch)


def foreign_ids(rows: Dataset, vocabulary: int, source: Source) -> Iterator[Finding]:
    """At most one finding: ids that no token of the tokenizer has. `vocabulary`: one more than its largest id."""
    names = [name for name in ("input_ids", "labels") if name in rows.column_names]
    start = 0
    for batch in rows.select_columns(names).with_format("arrow").iter(BATCH):
        for name in names:
            column = batch[name].combine_chunks()
            flat = pc.list_flatten(column)
            wrong = pc.or_(pc.less(flat, 0), pc.greater_equal(flat, vocabulary))
            if name == "labels":
                wrong = pc.and_(wrong, pc.not_equal(flat, -100))
            at = pc.indices_nonzero(wrong)
            if len(at):
                row = pc.list_parent_indices(column)[at[0].as_py()].as_py()
                yield finding(
                    "ZR526", row=source.row(start + row), name=name, flat=flat[at[0].as_py()], vocabulary=vocabulary - 1
                )
                return
        start += len(batch)
