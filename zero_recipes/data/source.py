"""Where rows come from: the files of a split, the line of a row, and what is wrong with a file that does not load."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zero_recipes.core.errors import first_line

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
JSON_LINES = (".jsonl", ".json", ".ndjson")
LOOKED_INTO = 1000  # files of a folder that does not load, at most


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
        except (OSError, ValueError, EOFError, csv.Error):
            return None  # it was read once; where it can be no more, the row's number has to do
        return None

    @property
    def is_csv(self) -> bool:
        return bool(self.files) and all(_kind(file) in (".csv", ".tsv") for file in self.files)


def source_of(script_args, dataset_args, split: str) -> Source:
    """The source of a split as `load_splits` loads it."""
    from datasets import load_dataset_builder

    if not dataset_args.datasets:
        named = [(script_args.dataset_name, {"name": script_args.dataset_config}, split)]
    elif dataset_args.test_split_size is None and all(each.fraction is None for each in dataset_args.datasets):
        named = [
            (each.path, {"name": each.name, "data_dir": each.data_dir, "data_files": each.data_files}, each.split)
            for each in dataset_args.datasets
        ]
    else:
        return Source(split)
    files: list[Path] = []
    for path, keys, of_split in named:
        try:
            found = (load_dataset_builder(path, **keys).config.data_files or {}).get(of_split, ())
        except Exception:  # whatever it is, loading the rows says it
            return Source(split)
        files += [Path(file) for file in found]
    return Source(split, tuple(files) if all(file.is_file() for file in files) else ())


def local_files(name: str | None, data_files: Any = None) -> list[Path]:
    """Files on this machine that a data set's name, or a mixture's `data_files`, can mean."""
    named = [data_files] if isinstance(data_files, str) else data_files or []
    named = [file for each in (named.values() if isinstance(named, dict) else named) for file in _as_list(each)]
    folder = Path(name) if name else None
    if folder is not None and folder.is_file():
        named.append(str(folder))
    elif folder is not None and folder.is_dir() and not named:
        named = [str(path) for path in sorted(folder.rglob("*"))[:LOOKED_INTO] if path.is_file()]
    return [Path(file) for file in named if Path(file).is_file()]


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value or [] if isinstance(each, str)]


def fault_in(files: list[Path]) -> str | None:
    """The first fault in data files that did not load: file, line and what is wrong; None where none is seen."""
    for file in files:
        if (fault := _fault(file)) is not None:
            return fault
    return None


def _fault(file: Path) -> str | None:
    kind = _kind(file)
    try:
        if kind == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.read_table(file)
        elif kind == ".arrow":
            _arrow_rows(file)
        elif kind in (*JSON_LINES, ".csv", ".tsv", ".txt"):
            return _fault_in_text(file, kind)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:  # pyarrow's errors are ValueErrors and OSErrors
        return f"{file}: {first_line(error)}"
    return None


def _fault_in_text(file: Path, kind: str) -> str | None:
    number = 0
    with _open(file) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    return f"{file} is UTF-16, not UTF-8"
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if kind in JSON_LINES and number == 1 and text.lstrip()[:1] == "[":
                    return _fault_in_array(file)
                if kind in JSON_LINES and text.strip() and (fault := _fault_in_line(text)):
                    return f"{file} line {number}: {fault}"
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            return f"{file} line {number} is not UTF-8: byte 0x{byte:02x} at place {error.start + 1} of the line"
        except (EOFError, OSError) as error:  # a cut archive
            return f"{file} ends after line {number}: {first_line(error)}"
    if kind in (".csv", ".tsv"):
        return _fault_in_csv(file)
    return f"{file} is empty" if number == 0 else _mixed_types(file) if kind in JSON_LINES else None


def _fault_in_array(file: Path) -> str | None:
    with _open(file) as lines:
        try:
            items = json.loads(lines.read().decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            return f"{file} line {error.lineno}: not JSON: {error.msg}"
        except RecursionError:
            return f"{file}: nested too deeply"
    odd = next((number for number, item in enumerate(items) if not isinstance(item, dict)), None)
    if odd is None:
        return None
    return f"{file}: item {odd} of its list is {named(items[odd])}, not an object with named columns"


def _fault_in_line(text: str) -> str | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at place {error.colno}"
    except RecursionError:
        return "nested too deeply"
    return None if isinstance(value, dict) else f"{named(value)}, not an object with named columns"


def _mixed_types(file: Path) -> str | None:
    """The first line whose value in some column has another type than the lines before."""
    seen: dict[str, tuple[type, int]] = {}
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            for column, value in (json.loads(line.decode("utf-8-sig")) if line.strip() else {}).items():
                if value is None:
                    continue
                found = float if type(value) is int else type(value)
                kind, first = seen.setdefault(column, (found, number))
                if found is not kind:
                    return f"{file} line {number}: {column} is {named(value)}, in line {first} it is {_NAMES[kind]}"
    return None


def _fault_in_csv(file: Path) -> str | None:
    with _open(file) as lines, io.TextIOWrapper(lines, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if _kind(file) == ".tsv" else ",")
        header = next(reader, None)
        if not header:
            return f"{file} is empty"
        try:
            for record in reader:
                if record and len(record) != len(header):
                    return f"{file} line {reader.line_num}: {len(record)} fields, the header has {len(header)}"
        except csv.Error as error:
            return f"{file} line {reader.line_num}: {error}"
    return None


def _row_lines(file: Path) -> Iterator[int | None]:
    """For each row of a file the line that it begins in, from 1; None in formats without lines."""
    kind = _kind(file)
    if kind in (".csv", ".tsv"):
        with _open(file) as lines, io.TextIOWrapper(lines, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter="\t" if kind == ".tsv" else ",")
            next(reader, None)
            start = reader.line_num + 1
            for record in reader:
                if record:
                    yield start
                start = reader.line_num + 1
    elif kind in JSON_LINES:
        with _open(file) as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip()[:1] == b"[":
                    yield from [None] * len(json.loads(line + lines.read()))
                    return
                if line.strip():
                    yield number
    elif kind == ".txt":
        with _open(file) as lines:
            yield from (number for number, _ in enumerate(lines, start=1))
    elif kind == ".parquet":
        import pyarrow.parquet

        yield from [None] * pyarrow.parquet.read_metadata(file).num_rows
    elif kind == ".arrow":
        yield from [None] * _arrow_rows(file)
    else:
        raise ValueError(f"no rows known of {file}")


def _arrow_rows(file: Path) -> int:
    import pyarrow

    with pyarrow.memory_map(str(file)) as mapped:
        try:
            return pyarrow.ipc.open_file(mapped).read_all().num_rows
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_stream(mapped).read_all().num_rows


def _kind(file: Path) -> str:
    return (file.with_suffix("") if file.suffix in COMPRESSED else file).suffix.lower()


def _open(file: Path) -> IO[bytes]:
    return COMPRESSED.get(file.suffix, open)(file, "rb")


_NAMES = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}


def named(value: Any) -> str:
    """A value's type in a reader's words, with the value where it is short."""
    if value is None:
        return "null"
    name = _NAMES.get(type(value), type(value).__name__)
    shown = repr(value)
    return f"{name} ({shown if len(shown) <= 40 else shown[:37] + '...'})"
