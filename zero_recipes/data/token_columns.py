"""Columns of token ids as flat numpy arrays, off Arrow's buffers: no token becomes a Python object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

BATCH = 1000  # rows in memory at a time


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
    """All rows in their order; labels are the ids where there is no such column.

    Raises ValueError where a row has not one label for each token.
    """
    for table in tables(rows, [name for name in ("input_ids", "labels") if name in rows.column_names]):
        ids, lengths = _flat(table["input_ids"])
        labels, labelled = (ids, lengths) if "labels" not in table.column_names else _flat(table["labels"])
        if not np.array_equal(lengths, labelled):
            raise ValueError("the labels of a row are not as many as its input_ids")
        yield TokenBatch(ids, labels, np.cumsum(lengths))


def tables(rows: Dataset, columns: list[str]) -> Iterator[pa.Table]:
    """The columns of BATCH rows after the other, as Arrow has them."""
    yield from rows.select_columns(columns).with_format("arrow").iter(BATCH)


def row_lengths(rows: Dataset, column: str = "input_ids") -> np.ndarray:
    """Entries of each row, shape (rows,). Reads offsets only."""
    parts = [_lengths(table[column].combine_chunks()) for table in tables(rows, [column])]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def values(rows: Dataset, column: str) -> np.ndarray:
    """All entries of a column of lists, row after row, shape (entries,)."""
    parts = [_flat(table[column])[0] for table in tables(rows, [column])]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def sums(counted: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each row how many of its tokens are counted: `counted` of shape (tokens,), bool; the rest of shape (rows,).

    np.add.reduceat gives the next row's first token for an empty row.
    """
    before = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
    return before[ends] - before[starts]


def last_positions(found: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each row the last of the ascending positions `found` that lies in it; -1 where none does."""
    last = np.full(len(ends), -1)
    last[np.searchsorted(ends, found, side="right")] = found  # numpy: of repeated indices the last one stays
    return last


def padding_share(lengths: np.ndarray, size: int, seed: int) -> float:
    """Of the tokens computed in shuffled batches of `size` rows, the share that is padding."""
    if not lengths.any():
        return 0.0
    shuffled = np.random.default_rng(seed).permutation(lengths)
    whole = len(shuffled) // size * size
    batches = [(size, shuffled[:whole].reshape(-1, size).max(axis=1).sum())]
    if whole < len(shuffled):
        batches.append((len(shuffled) - whole, shuffled[whole:].max()))
    return 1 - int(lengths.sum()) / sum(int(rows) * int(longest) for rows, longest in batches)


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """(values of shape (tokens,), lengths of shape (rows,)) of a column of lists."""
    whole = column.combine_chunks()
    return np.asarray(pc.list_flatten(whole)), _lengths(whole)


def _lengths(column: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
