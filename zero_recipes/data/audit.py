"""What the loss will see, counted: rows as they were tokenised beside rows as they are trained on.

Token columns are read as flat numpy arrays off Arrow's buffers: no token becomes a Python object.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.config.settings import Settings
from zero_recipes.core import findings as finding_texts
from zero_recipes.core.findings import Finding, finding, refusal
from zero_recipes.core.tables import plain

BATCH = 1000  # rows in memory at a time
MAX_BAD_ROW_SHARE = 0.01  # tatsu-lab/alpaca has 28 empty answers in 52,002 rows
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "position_ids")
# packing strategies that go on with a long row in the next pack: nothing is cut
SPLITTING = ("bfd_split", "wrapped")


@dataclass(frozen=True)
class RowKeys:
    """What a recipe says of its rows that TRL has no key for."""

    assistant_mask: str | None = None
    long_rows: str = "cut"
    thinking: str = "mask_empty"

    @classmethod
    def of(cls, settings: Settings) -> "RowKeys":
        """The keys of a run's settings."""
        return cls(settings.assistant_mask, settings.long_rows, settings.thinking)

    def drops(self, max_length: int | None) -> bool:
        """Whether rows longer than `max_length` are left out."""
        return self.long_rows == "drop" and max_length is not None


NO_KEYS = RowKeys()


@dataclass
class Audit:
    """Counts of one split. Tokens: of one epoch as trained on, the end of text included."""

    rows: int
    truncated: int  # longer than max_length: cut, or with packing "bfd_split" and "wrapped" split
    dropped: int  # nothing supervised within max_length
    # numbers of rows without a loss, however long; not of those of one token, which are blank lines
    without_supervision: list[int]
    tokens: int
    supervised: int
    longest: int  # of a row, before truncation
    longest_sequence: int  # as trained on, of what has positions from 0 on; in a run's audit of evaluation rows too
    largest_id: int  # of a token; in a run's audit of evaluation rows too
    unsupervised_ends: int  # rows short enough whose end of text is absent or carries no loss
    empty: list[int]  # row numbers whose text, or whose every answer, is empty, blank or missing

    @property
    def trained(self) -> int:
        """How many rows are trained on, in packs or not."""
        return self.rows - self.dropped

    def __str__(self) -> str:
        return (
            f"data          {self.rows:,} rows, {self.tokens:,} tokens, {self.supervised:,} supervised; "
            f"{self.truncated:,} longer than max_length, {self.dropped:,} dropped, longest {self.longest:,}"
        )


def audit(
    rows: Dataset, tokenised: Dataset, ready: Dataset, tokenizer: Tokenizer, training_args, ours: RowKeys = NO_KEYS
) -> Audit:
    """Count a split's rows and tokens.

    `rows` as loaded, `tokenised` whole, `ready` as trained on (truncated, packed, dropped).
    """
    batches = []
    for ids, labels, lengths in token_batches(tokenised):
        ended = _learns_to_end(ids, labels, np.cumsum(lengths), tokenizer.eos_token_id)
        batches.append([lengths, supervised_tokens(labels, lengths), ended, [ids.max(initial=0)]])
    lengths, supervised, ended, largest = map(np.concatenate, zip(*batches, strict=True))
    fits = np.full(len(lengths), True)
    if training_args.max_length is not None:
        fits = lengths <= training_args.max_length
    truncated = int((~fits).sum())
    dropped = len(lengths) - len(ready)
    if training_args.packing:
        dropped = truncated if ours.drops(training_args.max_length) else 0
    return Audit(
        rows=len(lengths),
        truncated=truncated,
        dropped=dropped,
        without_supervision=np.flatnonzero((supervised == 0) & (lengths != 1)).tolist(),
        tokens=int(row_lengths(ready).sum()),
        supervised=_supervised(ready, training_args.packing),
        longest=int(lengths.max()),
        longest_sequence=_longest_sequence(ready),
        largest_id=int(largest.max()),
        unsupervised_ends=int((fits & ~ended).sum()),
        empty=_empty_answers(rows, training_args.dataset_text_field),
    )


def supervised_tokens(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many tokens of each row have a loss, which its first one never has; shapes (tokens,), (rows,), (rows,)."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    carries = labels != -100
    carries[starts[lengths > 0]] = False
    before = np.concatenate([[0], np.cumsum(carries)])  # reduceat is wrong for empty rows
    return before[ends] - before[starts]


def skips_preparation(args) -> bool:
    """Whether the rows are token ids that nothing may change."""
    return bool((args.dataset_kwargs or {}).get("skip_prepare_dataset"))


# what the rows say, before they are tokens


def refuse_broken_tokens(rows: Dataset, tokenizer: Tokenizer, split: str) -> None:
    """Refuse token ids and masks that do not fit, which train otherwise without a message."""
    if "input_ids" in rows.column_names:
        for row, name, fault in _token_faults(rows, max(tokenizer.get_vocab().values())):
            raise refusal("ZR525", row=row, split=split, name=name, fault=fault)


def _token_faults(rows: Dataset, largest_id: int) -> Iterator[tuple[int, str, str]]:
    """(row, column, what is wrong)."""
    names = [name for name in TOKEN_COLUMNS if name in rows.column_names]
    for name in names:
        kind = rows.data.schema.field(name).type
        if not is_of_integers(kind):
            yield 0, name, f"is of the type {kind}"
    start = 0
    for table in tables(rows, names):
        lengths = _lengths(table["input_ids"].combine_chunks())
        for name in names:
            values, entries = flat(table[name])
            for row in np.flatnonzero((entries != lengths) | (lengths == 0)):
                yield start + row, name, f"has {entries[row]} entries for {lengths[row]} tokens"
            if name in ("input_ids", "labels"):
                is_unknown = (values < 0) | (values > largest_id)
                if name == "labels":
                    is_unknown &= values != -100
                for at in np.flatnonzero(is_unknown):
                    row = start + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
                    yield row, name, f"holds {values[at]}; the tokenizer's IDs go from 0 to {largest_id}"
        start += len(lengths)


def is_of_integers(kind: pa.DataType) -> bool:
    """Whether Arrow's type is a list of integers."""
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)


def _empty_answers(rows: Dataset, text_field: str) -> list[int]:
    """Numbers of the rows whose answers, or whose plain text, are blank; none where the rows are token ids."""
    if "input_ids" in rows.column_names:
        return []
    for column in ("completion", "messages", text_field):
        if column in rows.column_names:
            anyone = column == "completion"
            return [number for number, value in enumerate(rows[column]) if _is_empty(value, anyone)]
    return []


def _is_empty(value: str | list[dict[str, Any]], anyone: bool) -> bool:
    """Whether a text, or every message of an assistant or of `anyone`, is blank."""
    if isinstance(value, str):
        return not value.strip()
    for turn in value:
        if anyone or turn["role"] == "assistant":
            content = turn.get("content") or turn.get("tool_calls") or ""
            if str(content).strip():
                return False
    return True


def audit_findings(
    found: Audit,
    rows: Dataset,
    tokenizer: Tokenizer,
    training_args,
    ours: RowKeys,
    split: str,
    read_as: str,
    copies_without_empty: Callable[[], dict[str, str]] = dict,
) -> Iterator[Finding]:
    """What is wrong with a split by its counts: empty answers, rows without a loss or cut, ends that are not learned.

    `read_as`: in words what the columns were taken for. `copies_without_empty`: how empty answers are left out.
    """
    if found.empty:  # so many that they cannot be slips are an error; blank lines between texts are usual
        has_answers = not {"completion", "messages"}.isdisjoint(rows.column_names)
        most = (MAX_BAD_ROW_SHARE if has_answers else 1) * found.rows
        count = len(found.empty)
        row = found.empty[0]
        about = {"count": count, "rows": found.rows, "row": row, "text": str(rows[row])[:200], "read_as": read_as}
        level = "error" if count >= most else "warning"
        copies = copies_without_empty()
        hint = finding_texts.table()["ZR533"]["hints"]["csv"].format(**copies) if copies else ""
        yield finding("ZR533", level=level, split=split, hint=hint, **about)
    if found.without_supervision:
        count = len(found.without_supervision)
        row = found.without_supervision[0]
        yield finding("ZR512", count=count, split=split, row=row, text=str(rows[row])[:200])
    elif not found.supervised:
        yield finding("ZR513", split=split, max_length=training_args.max_length)
    elif _cuts_long_rows(training_args, ours) and found.truncated > max(1, MAX_BAD_ROW_SHARE * found.rows):
        counts = {"rows": found.rows, "truncated": found.truncated, "dropped": found.dropped, "longest": found.longest}
        limit = training_args.max_length
        yield finding("ZR553", max_length=limit, split=split, holding=holding(found.longest), **counts)
    if found.unsupervised_ends:
        yield finding("ZR514", count=found.unsupervised_ends, split=split, eos_token=tokenizer.eos_token)


def _cuts_long_rows(training_args, ours: RowKeys) -> bool:
    if training_args.packing and training_args.packing_strategy in SPLITTING:
        return False
    if ours.long_rows == "drop" or skips_preparation(training_args):
        return False
    return training_args.max_length is not None


def holding(tokens: int) -> int:
    """The least max_length for rows of so many tokens: a multiple of 64, as tiles of GPUs are."""
    return -(-tokens // 64) * 64


def overlap_findings(training: Dataset, evaluation: Dataset, split: str) -> Iterator[Finding]:
    """Find tokenised evaluation rows that are training rows too. At most one finding."""
    wanted = list(_ids_as_bytes(evaluation))
    known = set(wanted).intersection(_ids_as_bytes(training))
    same = [number for number, ids in enumerate(wanted) if ids in known]
    if same:
        yield finding("ZR538", count=len(same), rows=len(evaluation), split=split, row=same[0])


def left_out_findings(train: Any, evaluation: Dataset | None, settings: Settings, replicas: int) -> Iterator[Finding]:
    """Find evaluation rows that dataloader_drop_last leaves out; training rows only where it leaves none.

    `replicas`: ranks with rows of their own.
    """
    if not settings.dataloader_drop_last:
        return
    parts = [
        (settings.dataset_train_split, train, settings.per_device_train_batch_size),
        (settings.dataset_test_split, evaluation, settings.per_device_eval_batch_size),
    ]
    for split, rows, batch in parts:
        if not isinstance(rows, Dataset):
            continue
        left_out = len(rows) % (batch * replicas)
        all_are = left_out == len(rows)
        if all_are or (left_out and rows is evaluation):
            level = "error" if all_are else "warning"
            counts = {"left_out": left_out, "rows": len(rows), "batch": batch, "replicas": replicas}
            yield finding("ZR554", level=level, split=split, **counts)


def shown_rows(tokenised: Dataset, tokenizer: Tokenizer) -> list[tuple[int, list[tuple[str, bool]]]]:
    """Three rows of a split, first, middle and last, as (number, [(text, whether it carries loss)])."""
    found = []
    for number in sorted({0, len(tokenised) // 2, len(tokenised) - 1}):
        found.append((number, list(decoded_parts(tokenised[number], tokenizer))))
    return found


def decoded_parts(row: dict[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The texts of a tokenised row, part after part, as (text, whether it carries loss)."""
    pairs = zip(row["input_ids"], row.get("labels", row["input_ids"]), strict=True)
    for carries, part in groupby(pairs, lambda pair: pair[1] != -100):
        ids = [token for token, _ in part]
        yield tokenizer.decode(ids), carries


def show_rows(rows: list, console: Console, longest: int | None = None) -> None:
    """Print rows of `shown_rows`. What carries loss is green, or between brackets without colours.

    `longest`: characters of a row.
    """
    coloured = console.is_terminal and not console.no_color
    for number, parts in rows:
        text = plain(f"row {number}: ", style="bold")
        for words, carries in parts:
            if carries and not coloured:
                words = f"⟦{words}⟧"
            text.append(plain(words, style="bold green" if carries else "dim"))
        if longest is not None and len(text) > longest:
            text = text[:longest].append(" …")
        console.print(text)


def token_batches(rows: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The tokens of BATCH rows after the other: (ids, labels or else ids, lengths).

    Of the shapes (tokens,), (tokens,) and (rows,).
    """
    names = [name for name in ("input_ids", "labels") if name in rows.column_names]
    for table in tables(rows, names):
        ids, lengths = flat(table["input_ids"])
        labels = flat(table["labels"])[0] if "labels" in names else ids
        yield ids, labels, lengths


def tables(rows: Dataset, columns: list[str]) -> Iterator[pa.Table]:
    """The columns of BATCH rows after the other, as Arrow has them."""
    yield from rows.select_columns(columns).with_format("arrow").iter(BATCH)


def row_lengths(rows: Dataset) -> np.ndarray:
    """How many tokens each row has, shape (rows,). Reads offsets only."""
    batches = [np.zeros(0, dtype=np.int64)]
    for table in tables(rows, ["input_ids"]):
        batches.append(_lengths(table["input_ids"].combine_chunks()))
    return np.concatenate(batches)


def flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column of lists in one array, -1 for null, and how many each row has.

    Of the shapes (tokens,) and (rows,).
    """
    whole = column.combine_chunks()
    return np.asarray(pc.fill_null(pc.list_flatten(whole), -1)), _lengths(whole)


def _lengths(column: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)


def _learns_to_end(ids: np.ndarray, labels: np.ndarray, ends: np.ndarray, eos_token_id: int | None) -> np.ndarray:
    """For each row whether its last end of text carries loss; False where it has none. `ends`: of rows, exclusive."""
    places = np.flatnonzero(ids == eos_token_id)
    last = np.full(len(ends), -1)
    last[np.searchsorted(ends, places, side="right")] = places  # of repeated indices the last one stays
    found = last >= 0
    found[found] = labels[last[found]] != -100
    return found


def _longest_sequence(ready: Dataset) -> int:
    """Packs of TRL's "bfd" strategies begin their positions anew with each row; those of "wrapped" do not."""
    lengths = row_lengths(ready)
    if "seq_lengths" in ready.column_names:
        lengths = np.concatenate([flat(table["seq_lengths"])[0] for table in tables(ready, ["seq_lengths"])])
    return int(lengths.max(initial=0))


def _ids_as_bytes(rows: Dataset) -> Iterator[bytes]:
    for ids, _, lengths in token_batches(rows.select_columns(["input_ids"])):
        for row in np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1]):
            yield row.tobytes()


def _supervised(ready: Dataset, packed: bool) -> int:
    """Tokens that a loss is computed for."""
    packs = None
    if packed and "seq_lengths" in ready.column_names:
        packs = tables(ready, ["seq_lengths"])
    total = 0
    for _, labels, lengths in token_batches(ready):
        if packs is not None:
            lengths, _ = flat(next(packs)["seq_lengths"])
        total += int(supervised_tokens(labels, lengths).sum())
    return total
