"""Data folders with one wrong row, in a drawn place, shape and file format."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.helpers.bad_data import ALPACA, CHATS, IDS, PAIRS, SHAREGPT, TEXTS, lines, parquet
from tests.helpers.tiny import ROOT

REAL = ROOT.parent / "shared" / "fixtures" / "alpaca_2k.jsonl"
WRONG = [None, 5, -1.5, True, ["a"], [], {"a": 1}, {}, [None], [[1]], ...]
WRONG_IDS = [None, 5, "a", [], [-1], [10**6], [None], [1.5], ["a"], ...]
WRONG_CHATS = [None, "a", 5, [], [None], ["a"], [{}], [{"role": "user"}], [{"content": "a"}], {"role": "user"}, ...]
WRONG_CHATS += [[{"role": 5, "content": "a"}], [{"role": "user", "content": 5}], [{"role": None, "content": "a"}]]


def real_rows(count: int, draw: random.Random) -> list[dict]:
    return draw.sample([json.loads(line) for line in REAL.read_text().splitlines()], count)


def drawn(folder: Path, draw: random.Random) -> tuple[dict[str, Any], int, str]:
    """Write a data folder. Returns (the recipe's keys, the wrong row's number, its column)."""
    kind = draw.choice(["alpaca", "real", "pairs", "texts", "chats", "sharegpt", "ids"])
    if kind == "real" and not REAL.exists():
        kind = "alpaca"
    every = {"alpaca": ALPACA, "pairs": PAIRS, "texts": TEXTS, "chats": CHATS, "sharegpt": SHAREGPT, "ids": IDS}
    rows = real_rows(30, draw) if kind == "real" else list(every[kind])
    number, column = draw.randrange(len(rows)), draw.choice([name for name in rows[0] if name != "input"])
    values = WRONG_IDS if kind == "ids" else WRONG_CHATS if kind in ("chats", "sharegpt") else WRONG
    value = draw.choice(values)
    row = {name: each for name, each in (rows[number] | {column: value}).items() if each is not ...}
    rows[number] = row
    keys: dict[str, Any] = {"dataset_format": "alpaca"} if kind in ("alpaca", "real") else {}
    keys |= draw.choice(
        [{}, {}, {"dataset_num_proc": 2}, {"dataset_streaming": True, "max_steps": 1}, {"packing": True}]
    )
    write(folder, rows, draw)
    return keys, number, column


def write(folder: Path, rows: list[dict], draw: random.Random) -> None:
    """The rows in a drawn format that can hold them."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = all(isinstance(value, str) or value is None for row in rows for value in row.values())
    choices = ["jsonl", "json", "jsonl.gz", *(["csv"] if flat else [])]
    try:
        table = parquet(rows)
        choices += ["parquet", "arrow"]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        table = b""
    kind = draw.choice(choices)
    content = {
        "jsonl": lambda: lines(rows),
        "json": lambda: json.dumps(rows).encode(),
        "jsonl.gz": lambda: gzip.compress(lines(rows)),
        "csv": lambda: csv_of(rows),
        "parquet": lambda: table,
        "arrow": lambda: arrow(rows),
    }[kind]()
    (folder / f"train.{kind}").write_bytes(content)


def csv_of(rows: list[dict]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list({name: None for row in rows for name in row}))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(rows: list[dict]) -> bytes:
    table, buffer = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table)
    return buffer.getvalue()


def broken_bytes(folder: Path, draw: random.Random) -> None:
    """A file with bytes changed, cut off or put in."""
    write(folder, list(draw.choice([PAIRS, TEXTS, CHATS])), draw)
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    kind = draw.choice(["flip", "cut", "insert", "zero", "utf-16", "empty"])
    if kind == "flip":
        content[place] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "insert":
        content[place:place] = draw.randbytes(8)
    elif kind == "zero":
        content[place : place + 16] = bytes(16)
    elif kind == "empty":
        content = bytearray()
    else:
        content = bytearray(bytes(content).decode("latin-1").encode("utf-16"))
    file.write_bytes(content)
