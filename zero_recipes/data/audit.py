"""What the loss will see, counted: rows as they were tokenised beside rows as they are trained on.

Token columns are read as flat numpy arrays off Arrow's buffers: no token becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.core.findings import Finding, Refusal, finding, refusal
from zero_recipes.core.tables import Column, plain, print_columns, terminal

BATCH = 1000  # rows in memory at a time
MAX_BAD_ROW_SHARE = 0.01  # tatsu-lab/alpaca has 28 empty answers in 52,002 rows
NO_ANSWER = -1
MUCH_PADDING = 0.2  # of the tokens computed
FEW_ROWS = 1000  # padding of fewer costs little
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "position_ids")
# packing strategies that go on with a long row in the next pack: nothing is cut
SPLITTING = ("bfd_split", "wrapped")


@dataclass
class Audit:
    """One split, counted. Tokens: of one epoch as trained on, the end of text included."""

    rows: int
    truncated: int  # longer than max_length: cut, or with packing "bfd_split" and "wrapped" split
    dropped: int  # nothing supervised within max_length
    without_supervision: list[int]  # row numbers in which no token is supervised, however long
    tokens: int
    supervised: int
    longest: int  # of a row, before truncation
    most: int  # tokens that 99 % of the rows have at most, before truncation
    unsupervised_ends: int  # rows short enough whose end of text is absent or carries no loss
    padding_share: float  # of the tokens computed, in shuffled batches of per_device_train_batch_size
    packing_share: float | None  # of the packed places that hold a token; None without packing
    empty: list[int]  # row numbers whose text, or whose every answer, is empty or blank
    unanswered: list[int]  # row numbers of chats in which the assistant has no turn

    def __str__(self) -> str:
        packed = "" if self.packing_share is None else f", packs {self.packing_share:.0%} full"
        return (
            f"data          {self.rows:,} rows, {self.tokens:,} tokens, {self.supervised:,} supervised; "
            f"{self.truncated:,} longer than max_length, {self.dropped:,} dropped, longest {self.longest:,}; "
            f"padding {self.padding_share:.0%}{packed}"
        )


def audit(
    rows: Dataset, tokenised: Dataset, ready: Dataset, tokenizer: PreTrainedTokenizerBase, training_args
) -> Audit:
    """Count one split: `rows` as loaded, `tokenised` whole, `ready` as trained on (truncated, packed, dropped)."""
    longest, lengths, supervised, ended = training_args.max_length, [], [], []
    for batch in token_batches(tokenised):
        lengths.append(batch.lengths)
        supervised.append(sums(batch.labels != -100, batch))
        ended.append(_learns_to_end(batch, tokenizer.eos_token_id))
    whole, supervised, ended = map(np.concatenate, (lengths, supervised, ended))
    fits = np.full(len(whole), True) if longest is None else whole <= longest
    kept = row_lengths(ready)
    packed = training_args.packing
    answers = answer_lengths(rows, training_args.dataset_text_field)
    return Audit(
        rows=len(whole),
        truncated=int((~fits).sum()),
        dropped=0 if packed else len(whole) - len(kept),
        without_supervision=np.flatnonzero(supervised == 0).tolist(),
        tokens=int(kept.sum()),
        supervised=_supervised(ready, packed and "seq_lengths" in ready.column_names),
        longest=int(whole.max()),
        most=int(np.quantile(whole, 0.99, method="higher")),
        unsupervised_ends=int((fits & ~ended).sum()),
        padding_share=padding_of(kept, training_args),
        packing_share=int(kept.sum()) / (len(kept) * longest) if packed and len(kept) else None,
        empty=np.flatnonzero(answers == 0).tolist(),
        unanswered=np.flatnonzero(answers == NO_ANSWER).tolist(),
    )


# what the rows say, before they are tokens


def refuse_broken_rows(rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> None:
    """Refuse what trains otherwise without a message: messages without a role or content, which a template writes as
    None or as nothing, and token ids or masks that do not fit. Raises Refusal with the row."""
    if "input_ids" in rows.column_names:
        _refuse_broken_tokens(rows, 1 + max(tokenizer.get_vocab().values()), split)
        return
    chats = [name for name in ("prompt", "completion") if isinstance(rows[0].get(name), list)]
    chats += ["messages"] if "messages" in rows.column_names else []
    for start, batch in _batches(rows, chats):
        for name in chats:
            for number, messages in enumerate(batch[name], start):
                if (fault := _chat_fault(messages)) is not None:
                    raise refusal("ZR524", row=number, split=split, column=name, fault=fault)


def _chat_fault(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "is no list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not message.get("role"):
            return f"has no role in message {number}"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"has no content in message {number} ({message['role']})"
    return None


def _refuse_broken_tokens(rows: Dataset, vocabulary: int, split: str) -> None:
    """`vocabulary`: one more than the tokenizer's largest id."""
    names = [name for name in TOKEN_COLUMNS if name in rows.column_names]
    for name in names:
        if not is_of_integers(rows.data.schema.field(name).type):
            raise _broken_tokens(name, 0, split, f"is of the type {rows.data.schema.field(name).type}")
    start = 0
    for table in tables(rows, names):
        lengths = _lengths(table["input_ids"].combine_chunks())
        for name in names:
            values, entries = flat(table[name])
            for row in np.flatnonzero((entries != lengths) | (lengths == 0)):
                raise _broken_tokens(name, start + row, split, f"has {entries[row]} entries for {lengths[row]} tokens")
            known = (values >= 0) & (values < vocabulary) | ((values == -100) & (name == "labels"))
            for at in np.flatnonzero(~known) if name in ("input_ids", "labels") else ():
                row = start + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
                raise refusal("ZR526", row=row, split=split, name=name, id=values[at], last=vocabulary - 1)
        start += len(lengths)


def is_of_integers(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)


def _broken_tokens(name: str, row: int, split: str, fault: str) -> Refusal:
    return refusal("ZR525", row=row, split=split, name=name, fault=fault)


def answer_lengths(rows: Dataset, text_field: str) -> np.ndarray:
    """For each row the characters of its longest answer without blanks around it, NO_ANSWER for a chat in which the
    assistant has no turn; of plain texts the text's. Empty where the rows are token ids."""
    names = ("completion", "messages", text_field)
    column = next((name for name in names if name in rows.column_names), None)
    if column is None or "input_ids" in rows.column_names:
        return np.zeros(0, dtype=np.int64)
    found = [
        _answer_length(value, anyone=column == "completion")
        for _, batch in _batches(rows, [column])
        for value in batch[column]
    ]
    return np.array(found)


def _answer_length(value: str | list[dict[str, Any]], anyone: bool) -> int:
    if isinstance(value, str):
        return len(value.strip())
    turns = [turn for turn in value if anyone or turn["role"] == "assistant"]
    return max(
        (len(str(turn.get("content") or turn.get("tool_calls") or "").strip()) for turn in turns), default=NO_ANSWER
    )


def _batches(rows: Dataset, names: list[str]) -> Iterator[tuple[int, dict[str, list]]]:
    """(number of the first row, columns) of BATCH rows after the other; nothing without names."""
    batches = rows.select_columns(names).with_format(None).iter(BATCH) if names else ()
    yield from ((number * BATCH, batch) for number, batch in enumerate(batches))


# what is wrong with them


def audit_findings(
    found: Audit, rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, split: str = "the data"
) -> list[Finding]:
    """What is wrong with a split's data."""
    findings = list(_answer_findings(found, rows, split))
    bare = found.without_supervision
    if bare:
        findings.append(finding("ZR512", count=len(bare), split=split, row=bare[0], text=str(rows[bare[0]])[:200]))
    elif not found.supervised:
        findings.append(finding("ZR513", split=split, max_length=training_args.max_length))
    else:
        findings += _cut_findings(found, training_args, split)
    if found.unsupervised_ends:
        count = found.unsupervised_ends
        findings.append(finding("ZR514", count=count, split=split, eos_token=tokenizer.eos_token))
    return findings


def _answer_findings(found: Audit, rows: Dataset, split: str) -> Iterator[Finding]:
    """Empty answers and chats without one: an error where they are so many that they cannot be slips."""

    def level(numbers: list[int], most: float) -> str:
        return "error" if len(numbers) >= most * found.rows else "warning"

    counts = {"rows": found.rows, "split": split}
    if found.unanswered:
        first = found.unanswered[0]
        roles = ", ".join(dict.fromkeys(turn["role"] for turn in rows[first]["messages"]))
        how = level(found.unanswered, MAX_BAD_ROW_SHARE)
        yield finding("ZR531", level=how, count=len(found.unanswered), row=first, roles=roles, **counts)
    if found.empty:
        answers = not {"completion", "messages"}.isdisjoint(rows.column_names)
        how = level(found.empty, MAX_BAD_ROW_SHARE if answers else 1)  # blank lines between texts are usual
        yield finding("ZR533", level=how, count=len(found.empty), row=found.empty[0], **counts)


def holding(tokens: int) -> int:
    """The least max_length that holds rows of so many tokens: a multiple of 64, which tiles of matrix products on GPUs
    divide."""
    return -(-tokens // 64) * 64


def _cut_findings(found: Audit, training_args, split: str) -> Iterator[Finding]:
    """At most one finding: more rows are cut than could be slips."""
    longest, skips = training_args.max_length, (training_args.dataset_kwargs or {}).get("skip_prepare_dataset")
    splitting = training_args.packing and training_args.packing_strategy in SPLITTING
    if longest is None or skips or splitting or found.truncated <= max(1, MAX_BAD_ROW_SHARE * found.rows):
        return
    yield finding(
        "ZR553",
        max_length=longest,
        truncated=found.truncated,
        rows=found.rows,
        split=split,
        dropped=found.dropped,
        holding=holding(found.longest),
        longest=found.longest,
        most=holding(found.most),
    )


def overlap_findings(training: Dataset, evaluation: Dataset, split: str) -> Iterator[Finding]:
    """At most one finding: tokenised evaluation rows that are training rows too."""
    wanted = list(_ids_as_bytes(evaluation))
    known = set(wanted).intersection(_ids_as_bytes(training))
    same = [number for number, ids in enumerate(wanted) if ids in known]
    if same:
        yield finding("ZR538", count=len(same), rows=len(evaluation), split=split, row=same[0])


def padding_findings(found: Audit, training_args) -> Iterator[Finding]:
    """At most one finding: much of what a step computes is padding, and packing or grouping would not compute it."""
    share = found.padding_share
    if training_args.train_sampling_strategy != "group_by_length" and found.rows >= FEW_ROWS and share >= MUCH_PADDING:
        yield finding("ZR563", share=share, times=1 / (1 - share))


def show_audit(found: Audit, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> None:
    """The counts as a table, and three rows with the supervised part in colour."""
    console = terminal()
    counts = {
        "rows": f"{found.rows:,}",
        f"truncated at {training_args.max_length}": f"{found.truncated:,}",
        "dropped, no answer within max_length": f"{found.dropped:,}",
        "tokens": f"{found.tokens:,}",
        "supervised tokens": f"{found.supervised:,} ({found.supervised / max(1, found.rows):.1f} a row)",
        "longest row, in tokens": f"{found.longest:,}; 99 % have at most {found.most:,}",
        "padding": f"{100 * found.padding_share:.1f} % of the tokens computed",
    }
    if found.packing_share is not None:
        counts["packing"] = f"{100 * found.packing_share:.1f} % of the places filled"
    named, others = Column("what the loss will see", itemgetter(0)), Column("", itemgetter(1))
    print_columns([named], [others], list(counts.items()), console)
    for number in sorted({0, found.rows // 2, found.rows - 1}):
        text = plain(f"row {number}: ", style="bold")
        row = tokenised[number]
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            text.append(plain(tokenizer.decode([token]), style="dim" if label == -100 else "bold green"))
        console.print(text)


# columns of tokens


class TokenBatch(NamedTuple):
    """Some rows, one after the other: `ids` and `labels` of shape (tokens,), `ends` of shape (rows,), exclusive."""

    ids: np.ndarray
    labels: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    @property
    def starts(self) -> np.ndarray:
        return self.ends - self.lengths


def token_batches(rows: Dataset) -> Iterator[TokenBatch]:
    """All rows in their order; labels are the ids where there is no such column."""
    for table in tables(rows, [name for name in ("input_ids", "labels") if name in rows.column_names]):
        ids, lengths = flat(table["input_ids"])
        labels = ids if "labels" not in table.column_names else flat(table["labels"])[0]
        yield TokenBatch(ids, labels, np.cumsum(lengths))


def tables(rows: Dataset, columns: list[str]) -> Iterator[pa.Table]:
    """The columns of BATCH rows after the other, as Arrow has them."""
    yield from rows.select_columns(columns).with_format("arrow").iter(BATCH)


def row_lengths(rows: Dataset) -> np.ndarray:
    """Tokens of each row, shape (rows,). Reads offsets only."""
    parts = [_lengths(table["input_ids"].combine_chunks()) for table in tables(rows, ["input_ids"])]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def values_of(rows: Dataset, column: str) -> np.ndarray:
    """All entries of a column of lists, row after row, shape (entries,)."""
    parts = [flat(table[column])[0] for table in tables(rows, [column])]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def sums(counted: np.ndarray, batch: TokenBatch) -> np.ndarray:
    """For each row how many of its tokens are counted: `counted` of shape (tokens,), bool.

    np.add.reduceat gives the next row's first token for an empty row.
    """
    before = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
    return before[batch.ends] - before[batch.starts]


def padding_of(lengths: np.ndarray, training_args) -> float:
    """Of the tokens computed in shuffled micro batches, the share that is padding.

    `lengths`: of the rows as trained on, shape (rows,).
    """
    if training_args.packing or training_args.padding_free or not lengths.any():
        return 0.0
    size = training_args.per_device_train_batch_size
    shuffled = np.random.default_rng(training_args.seed).permutation(lengths)
    micro_batches = np.split(shuffled, range(size, len(shuffled), size))
    return 1 - int(lengths.sum()) / sum(len(each) * int(each.max()) for each in micro_batches)


def flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """(values of shape (tokens,), lengths of shape (rows,)) of a column of lists; -1 for null."""
    whole = column.combine_chunks()
    return np.asarray(pc.fill_null(pc.list_flatten(whole), -1)), _lengths(whole)


def _lengths(column: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)


def _learns_to_end(batch: TokenBatch, eos_token_id: int | None) -> np.ndarray:
    """For each row whether its last end of text carries loss; False where it has none."""
    places = np.flatnonzero(batch.ids == eos_token_id)
    last = np.full(len(batch.ends), -1)
    last[np.searchsorted(batch.ends, places, side="right")] = places  # of repeated indices the last one stays
    found = last >= 0
    found[found] = batch.labels[last[found]] != -100
    return found


def _ids_as_bytes(rows: Dataset) -> Iterator[bytes]:
    for batch in token_batches(rows.select_columns(["input_ids"])):
        flat = batch.ids.astype(np.int64)
        yield from (flat[start:end].tobytes() for start, end in zip(batch.starts, batch.ends, strict=True))


def _supervised(ready: Dataset, packed: bool) -> int:
    """Tokens that a loss is computed for: the first token of a row, or of each packed row, is never predicted."""
    total = 0
    parts = tables(ready, ["seq_lengths"]) if packed else None
    for batch in token_batches(ready):
        carries = batch.labels != -100
        lengths = batch.lengths if parts is None else flat(next(parts)["seq_lengths"])[0]
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        total += int(carries.sum() - carries[firsts].sum())
    return total
