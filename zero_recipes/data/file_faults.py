"""What is wrong with a data file that does not load, or that should not be loaded: the line, in a reader's words."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zero_recipes.core.findings import first_line
from zero_recipes.data.source import JSON_LINES, NAMES, arrow_rows, format_of, named, open_file, records

UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
DEEPEST = 500  # brackets within each other
LOOKED_INTO = 1000  # files of a folder that does not load, at most


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
    try:
        return next(filter(None, map(_fault, files)), None) or _other_columns(files)
    except Exception:  # a look for more words: the library's own are there already
        return None


def _other_columns(files: list[Path]) -> str | None:
    """The first file whose first row has other columns than the first file's."""
    found: tuple[Path, list[str]] | None = None
    for file in files:
        columns = sorted(_first_columns(file))
        if found is not None and columns and columns != found[1]:
            return f"{file} has the columns {', '.join(columns)}, {found[0]} has {', '.join(found[1])}"
        found = found or ((file, columns) if columns else None)
    return None


def _first_columns(file: Path) -> list[str]:
    if format_of(file) in (".csv", ".tsv"):
        with records(file) as found:
            return next(found, (1, []))[1]
    if format_of(file) == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_schema(file).names
    if format_of(file) not in JSON_LINES:
        return []
    with open_file(file) as lines:
        first = next((line for line in lines if line.strip()), b"{}")
        return list((json.loads(first + lines.read())[0] if first.lstrip()[:1] == b"[" else json.loads(first)).keys())


def _fault(file: Path) -> str | None:
    kind = format_of(file)
    try:
        if kind == ".parquet":
            import pyarrow.parquet

            return None if pyarrow.parquet.read_table(file).num_rows else f"{file} holds no row"
        elif kind == ".arrow":
            arrow_rows(file)
        elif kind in (*JSON_LINES, ".csv", ".tsv", ".txt"):
            return _fault_in_text(file, kind)
    except (*UNREADABLE, ValueError) as error:  # pyarrow's errors are ValueErrors and OSErrors
        return f"{file}: {first_line(error)}"
    return None


def _fault_in_text(file: Path, kind: str) -> str | None:
    number, filled = 0, False
    with open_file(file) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    return f"{file} is UTF-16, not UTF-8"
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if kind in JSON_LINES and number == 1 and text.lstrip()[:1] == "[":
                    return _fault_in_array(file)
                filled = filled or bool(text.strip())
                if kind in JSON_LINES and text.strip() and (fault := _fault_in_line(text)):
                    return f"{file} line {number}: {fault}"
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            return f"{file} line {number} is not UTF-8: byte 0x{byte:02x} at place {error.start + 1} of the line"
        except UNREADABLE as error:  # a cut archive
            return f"{file} ends after line {number}: {first_line(error)}"
    if kind in (".csv", ".tsv"):
        return ragged(file, strict=True)
    if not filled:
        return f"{file} holds no row" if number else f"{file} is empty"
    return _mixed_types(file) if kind in JSON_LINES else None


def _fault_in_array(file: Path) -> str | None:
    with open_file(file) as lines:
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
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at place {error.colno}"
    except UnicodeEncodeError:
        return "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"
    return None if isinstance(value, dict) else f"{named(value)}, not an object with named columns"


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"not JSON: {word} is no number of JSON")


def nested_too_deeply(files: Sequence[Path]) -> str | None:
    """The first JSON file and line with more than DEEPEST brackets within each other.

    The datasets library's parsers end the process on such a line, or never end (pyarrow 25, ujson in pandas 3).
    """
    for file in files:
        if format_of(file) not in JSON_LINES:
            continue
        with contextlib.suppress(*UNREADABLE), open_file(file) as lines:  # who loads it says what is wrong
            for number, line in enumerate(lines, start=1):
                if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(line) > DEEPEST:
                    return f"{file} line {number}: nested too deeply"
    return None


def _depth(line: bytes) -> int:
    depth = deepest = 0
    for bracket in re.findall(rb"[\[{\]}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", line)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def mixed_list(files: Sequence[Path]) -> str | None:
    """The first value in JSON lists whose type is not that of the items before. A stream of such a list gives every
    value of the column as JSON text, without a type (datasets 5.2, packaged_modules/json)."""
    for file in files:
        if format_of(file) in JSON_LINES:
            with open_file(file) as lines:
                content = lines.read() if lines.read(1) == b"[" else b""
            if content and (fault := _first_mixed(enumerate(json.loads(b"[" + content)), "item")):
                return f"{file} {fault}"
    return None


def _mixed_types(file: Path) -> str | None:
    """The first line whose value in some column has another type than the lines before."""
    with open_file(file) as lines:
        rows = ((number, json.loads(line.decode("utf-8-sig"))) for number, line in enumerate(lines, 1) if line.strip())
        fault = _first_mixed(rows, "line")
    return fault and f"{file} {fault}"


def _first_mixed(rows: Iterable[tuple[int, dict[str, Any]]], unit: str) -> str | None:
    seen: dict[str, tuple[type, int]] = {}
    for number, row in rows:
        for column, value in row.items():
            if value is None:
                continue
            found = float if type(value) is int else type(value)
            known, first = seen.setdefault(column, (found, number))
            if found is not known:
                return f"{unit} {number}: {column} is {named(value)}, in {unit} {first} it is {NAMES[known]}"
    return None


def ragged(file: Path, strict: bool = False) -> str | None:
    """The first record of a CSV file with more or fewer fields than its header; `strict`: or with stray quotes."""
    line = 1
    with records(file, strict) as found:
        try:
            header = next(found, (1, []))[1]
            if not header:
                return f"{file} is empty"
            filled = False
            for line, record in found:
                filled = True
                if len(record) != len(header):
                    return f"{file} line {line}: {len(record)} fields, the header has {len(header)}"
        except csv.Error as error:
            return f"{file} after line {line}: {error}"
    return None if filled else f"{file} holds no row"
