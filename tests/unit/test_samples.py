"""Samples: whatever people and models write is printed, written and read again; the tokens are training's own."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
from collections.abc import Callable

import pytest
from rich.console import Console

from zero_recipes.core import files, tables
from zero_recipes.data.samples import Sample
from zero_recipes.metrics.read_runs import read_samples
from zero_recipes.report.judge import JUDGED_SCORES
from zero_recipes.training.samples import Answers, show_samples, write_samples

HOSTILE = ["[/INST]", "[bold]x", "[/]", "[link=file:///x]y[/link]", "[@click=f()]", "\\[red]", "\\", ":smile:", ""]
HOSTILE += [
    "\x1b[2J\x1b]0;title\x07",
    "\r",
    "\x00",
    "\b\b\b",
    "\u202ereversed\u202c",
    "\u2066x",
    "שלום",
    "سلام",
    "語" * 90,
]
HOSTILE += ["\u2028", "\u200b", "e\u0301" * 50, "x" * 100_000, "\t\n\n", "👩‍👩‍👧‍👦", "\ufeff", "\x85", "\udc80\ud800"]


def hostile_text(draw: random.Random) -> str:
    parts = draw.choices(HOSTILE, k=draw.randint(0, 4))
    return "".join(parts) + "".join(chr(draw.randrange(0xD800)) for _ in range(draw.randint(0, 20)))


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 60 columns that knows ASCII only."""
    monkeypatch.setenv("COLUMNS", "60")

    def printed(show: Callable[[], None]) -> str:
        file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
        with contextlib.redirect_stdout(file):
            show()
        return file.buffer.getvalue().decode()

    return printed


@pytest.mark.parametrize("seed", range(40))
def test_any_text_is_printed_written_and_read_again(screen, tmp_path, seed):
    draw = random.Random(seed)
    count = draw.randint(1, 7)
    numbers = [None, math.nan, math.inf, 0.5, 3.0]

    def texts():  # a tokenizer gives and takes no half of a surrogate pair
        return [hostile_text(draw).encode("utf-8", "replace").decode() for _ in range(count)]

    samples = [
        Sample(prompt, draw.choice([None, "", reference]), labels=draw.choice([(), (-100, 5)]))
        for prompt, reference in zip(texts(), texts(), strict=True)
    ]
    before, after = (Answers(texts(), draw.choices(numbers, k=count)) for _ in range(2))
    rows = write_samples(tmp_path / "samples.jsonl", samples, before, after)
    assert read_samples(tmp_path / "samples.jsonl") == rows
    for line in (tmp_path / "samples.jsonl").read_text().split("\n"):
        if line:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for row, sample, one, other in zip(rows, samples, before.reference_losses, after.reference_losses, strict=True):
        known = all(loss is not None and math.isfinite(loss) for loss in (one, other))
        assert (row.unscored is None) == (sample.reference is None or known)
        assert (set(row.scores_after) == set(JUDGED_SCORES)) == (sample.reference is not None)
    printed = screen(lambda: show_samples(rows, "from [/a] file"))
    assert "from [/a] file" in printed.replace("\n", "") and "\x1b" not in printed and "\x00" not in printed


def test_markup_orders_to_the_terminal_and_half_characters_are_shown():
    console = Console(width=60, file=io.StringIO())
    wild = ["[/INST] [bold]", "\x1b[31mred", "\ud800", "\u202eabc"]
    tables.print_texts("[/title]", ["[/head]", "b", "c", "d"], [wild], console)
    printed = console.file.getvalue()
    for expected in ("[/title]", "[/head]", "[/INST]", "[bold]", "\\x1b[31mred", "\\ud800", "\\u202eabc"):
        assert expected in printed
    column = tables.Column("[/name]", str)
    tables.print_columns([column], [], ["[/x]"], console)
    assert "[/name]" in console.file.getvalue() and "[/x]" in console.file.getvalue()


@pytest.mark.parametrize("seed", range(20))
def test_json_of_any_numbers_is_strict_and_whole(tmp_path, seed):
    draw = random.Random(seed)

    def value(depth: int):
        kind = draw.randrange(7 if depth < 4 else 4)
        if kind == 4:
            return [value(depth + 1) for _ in range(draw.randint(0, 3))]
        if kind == 5:
            return {f"k{i}": value(depth + 1) for i in range(draw.randint(0, 3))}
        if kind == 6:
            return (value(depth + 1), 1)
        return draw.choice([math.nan, math.inf, -math.inf, 1.5, 7, None, True, "NaN", "\u2028", "\x00"])

    document = {"a": value(0), "b": math.nan}
    files.write_json(tmp_path / "x.json", document)
    found = json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found == files.without_nan(json.loads(json.dumps(document))) and found["b"] is None
    (line,) = files.json_lines([document]).rstrip("\n").split("\n")
    assert json.loads(line) == found
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
