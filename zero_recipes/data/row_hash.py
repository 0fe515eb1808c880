"""A hash of rows: of their values and boundaries in their order, whatever Arrow's chunks and the width of integers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from zero_recipes.data.token_columns import tables

VERSION = "2:"  # before the digits; hashes of the first version have nothing there
FIRST_VERSION_ROWS = 1000  # at once; the batches' boundaries are part of that hash


def data_sha256(rows: Dataset) -> str:
    """A hash of the rows themselves, in their order.

    Not the key under which prepared rows are kept: that one also changes with TRL's version and with our own code,
    which need not make other rows. Values, lengths and nulls of each column go into hashes of their own, and these into
    one, so that it does not matter in which portions they come.
    """
    streams: dict[str, hashlib._Hash] = {}
    for table in tables(rows, sorted(rows.column_names)):
        for name in table.column_names:
            for kind, data in _streams(table[name].combine_chunks(), name):
                streams.setdefault(kind, hashlib.sha256()).update(data)
    whole = hashlib.sha256()
    for kind, digest in sorted(streams.items()):
        whole.update(f"{kind} {digest.hexdigest()}\n".encode())
    return VERSION + whole.hexdigest()


def same_rows(written: str, data_sha256: str, rows: Dataset) -> bool:
    """Whether `written`, of this version or the first, is the hash of the rows; `data_sha256` is this version's."""
    return written == (data_sha256 if written.startswith(VERSION) else first_version(rows))


def first_version(rows: Dataset) -> str:
    """The hash that checkpoints have which were written before VERSION. It makes text of every token."""
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(FIRST_VERSION_ROWS):
        digest.update(repr(sorted(batch.items())).encode())
    return digest.hexdigest()


def _streams(values: pa.Array, path: str) -> Iterator[tuple[str, bytes | memoryview]]:
    """(name of a stream, bytes that go into it) of an array's values: the same for any portions of it together."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    yield f"{path} valid", _bytes(values.is_valid(), "u1")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield f"{path} lengths", _bytes(pc.fill_null(pc.list_value_length(values), 0), "<i8")
        yield from _streams(pc.list_flatten(values), f"{path}[]")
    elif pa.types.is_struct(kind):
        for number, field in enumerate(kind):
            yield from _streams(pc.struct_field(values, [number]), f"{path}.{field.name}")
    elif pa.types.is_integer(kind):
        yield f"{path} integers", _bytes(pc.fill_null(values, 0), "<i8")
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = [text.encode() for text in pc.fill_null(values, "").to_pylist()]
        yield f"{path} lengths", np.array([len(text) for text in texts], dtype="<i8").tobytes()
        yield f"{path} texts", b"".join(texts)
    else:
        yield f"{path} values", "".join(f"{value!r}\n" for value in values.to_pylist()).encode()


def _bytes(values: pa.Array, dtype: str) -> memoryview:
    return memoryview(np.ascontiguousarray(values.to_numpy(zero_copy_only=False).astype(dtype, copy=False))).cast("B")
