"""Where rows come from: the files of a split, the line of a row, and what is wrong with a file that does not load."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
JSON_LINES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Source:
    """A split's name, and its files on this machine in the order of their rows; none where rows were drawn or mixed,
    or come from the hub."""

    split: str
    files: tuple[Path, ...] = ()

    def row(self, number: int) -> str:
        """A row for a message: "row 17 of train (data/train.jsonl line 18)". `number` counts from 0."""
        place = self.place(number)
        return f"row {number} of {self.split}" + (f" ({place})" if place else "")

    def place(self, number: int) -> str | None:
        """The file of a row and its line, from 1, where the format has lines."""
        try:
            for file in self.files:
                rows = 0
                for line in _row_lines(file):
                    if rows == number:
                        return f"{file}" if line is None else f"{file} line {line}"
                    rows += 1
                number -= rows
        except Exception:
            return None  # it was read once; where it can be no more, the row's number has to do
        return None

    def cells(self, column: str) -> Iterator[str]:
        """The cells of a column of CSV files, as they are written."""
        for file in self.files:
            with records(file) as found:
                place = next(found)[1].index(column)
                yield from (record[place] for _, record in found)

    @property
    def is_csv(self) -> bool:
        return bool(self.files) and all(format_of(file) in (".csv", ".tsv") for file in self.files)


def both_sources(script_args, dataset_args) -> tuple[Source, Source]:
    """Where the training rows and the evaluation rows come from, as `load_splits` loads them.

    The files are looked up once for both.
    """
    splits = script_args.dataset_train_split, script_args.dataset_test_split
    if not dataset_args.datasets:
        found = _files_by_split(script_args.dataset_name, name=script_args.dataset_config)
        return tuple(_source(split, None if found is None else found.get(split)) for split in splits)
    files = _mixed_files(dataset_args)
    return _source(splits[0], files), _source(splits[1], files)


def _mixed_files(dataset_args) -> list[str] | None:
    """The files of a mixture in the order of their rows; None where rows are drawn or a file cannot be found."""
    if dataset_args.test_split_size is not None or any(each.fraction is not None for each in dataset_args.datasets):
        return None
    files: list[str] = []
    for each in dataset_args.datasets:
        found = _files_by_split(each.path, name=each.name, data_dir=each.data_dir, data_files=each.data_files)
        if found is None:
            return None
        files += found.get(each.split, ())
    return files


def _files_by_split(path: str, **keys: Any) -> Mapping[str, Sequence[str]] | None:
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(path, **keys).config.data_files or {}
    except Exception:
        return None  # whatever it is, loading the rows says it


def _source(split: str, named: Sequence[str] | None) -> Source:
    files = tuple(map(Path, named or ()))
    return Source(split, files if all(file.is_file() for file in files) else ())


@contextlib.contextmanager
def records(file: Path, strict: bool = False) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """(line that it begins in, fields) of each record that is not blank, the header's first."""
    with open_file(file) as lines, io.TextIOWrapper(lines, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if format_of(file) == ".tsv" else ",", strict=strict)

        def found() -> Iterator[tuple[int, list[str]]]:
            start = 1
            for record in reader:
                if record:
                    yield start, record
                start = reader.line_num + 1

        yield found()


def _row_lines(file: Path) -> Iterator[int | None]:
    """For each row of a file the line that it begins in, from 1; None in formats without lines."""
    kind = format_of(file)
    if kind in (".csv", ".tsv"):
        with records(file) as found:
            next(found, None)
            yield from (line for line, _ in found)
    elif kind in JSON_LINES:
        with open_file(file) as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip()[:1] == b"[":
                    yield from [None] * len(json.loads(line + lines.read()))
                    return
                if line.strip():
                    yield number
    elif kind == ".txt":
        with open_file(file) as lines:
            yield from (number for number, _ in enumerate(lines, start=1))
    elif kind == ".parquet":
        import pyarrow.parquet

        yield from [None] * pyarrow.parquet.read_metadata(file).num_rows
    elif kind == ".arrow":
        yield from [None] * arrow_rows(file)
    else:
        raise ValueError(f"no rows known of {file}")


def arrow_rows(file: Path) -> int:
    import pyarrow

    with pyarrow.memory_map(str(file)) as mapped:
        try:
            return pyarrow.ipc.open_file(mapped).read_all().num_rows
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_stream(mapped).read_all().num_rows


def format_of(file: Path) -> str:
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix.lower()


def open_file(file: Path) -> IO[bytes]:
    return COMPRESSED.get(file.suffix, open)(file, "rb")


NAMES = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}


def named(value: Any) -> str:
    """A value's type in a reader's words, with the value where it is short."""
    if value is None:
        return "null"
    name = NAMES.get(type(value), type(value).__name__)
    shown = repr(value)
    return f"{name} ({shown if len(shown) <= 40 else shown[:37] + '...'})"
