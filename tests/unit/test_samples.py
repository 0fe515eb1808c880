"""Samples: whatever people and models write is printed, written and read again."""

import contextlib
import io
import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from zero_recipes.core import files, tables
from zero_recipes.data.samples import Sample
from zero_recipes.metrics.read_runs import read_samples
from zero_recipes.report.judge import JUDGED_SCORES
from zero_recipes.training.samples import Answers, sample_rows, show_samples, text_scores, write_rows

HOSTILE = ["[/INST]", "[bold]x", "[link=file:///x]y[/link]", "\\[red]", "\\", ":smile:", "", "\x1b[2J\x1b]0;title\x07"]
HOSTILE += ["\r", "\x00", "\b\b\b", "\u202ereversed\u202c", "שלום", "語" * 90, "\u2028", "e\u0301" * 50, "x" * 100_000]
HOSTILE += ["\t\n\n", "👩‍👩‍👧‍👦", "\ufeff", "\x85", "�"]
TEXT = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=20), max_size=4).map("".join)  # no half of a surrogate pair
LOSS = st.sampled_from([None, math.nan, math.inf, 0.5, 3.0])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(TEXT, st.none() | TEXT, TEXT, TEXT, LOSS, LOSS), min_size=1, max_size=7))
def test_any_text_is_printed_written_and_read_again(drawn):
    prompts, references, *texts, before, after = map(list, zip(*drawn, strict=True))
    samples = [Sample(prompt, reference) for prompt, reference in zip(prompts, references, strict=True)]
    rows = sample_rows(samples, Answers(texts[0], before), Answers(texts[1], after))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        write_rows(path, rows)
        assert read_samples(path) == rows
        for line in path.read_text().split("\n")[:-1]:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for row, reference, loss in zip(rows, references, after, strict=True):
        assert set(row.scores_after) == (set() if reference is None else set(JUDGED_SCORES))
        assert row.scores_after.get("reference_loss") == (
            loss if reference is not None and loss in (0.5, 3.0) else None
        )
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)  # of few characters
    with contextlib.redirect_stdout(screen):
        show_samples(rows, "from [/a] file")
    printed = screen.buffer.getvalue().decode()
    assert "[/a]" in printed and "\x1b" not in printed and "\x00" not in printed


def test_scores():
    assert text_scores(" The fish hums.", "The fish hums.") == {"exact_match": 1.0, "token_f1": 1.0}
    assert text_scores("The cat hums.", "The fish hums.") == {"exact_match": 0.0, "token_f1": pytest.approx(2 / 3)}


def test_markup_orders_to_the_terminal_and_half_characters_are_shown():
    console = Console(width=60, file=io.StringIO())
    tables.print_texts("[/title]", ["[/head]", "b"], [["[/INST] [bold]", "\x1b[31mred \ud800\u202e"]], console)
    tables.print_columns([tables.Column("[/name]", str)], [], ["[/x]"], console)
    for expected in ("[/title]", "[/head]", "[/INST]", "\\x1b[31mred", "\\ud800", "[/name]", "[/x]"):
        assert expected in console.file.getvalue()


VALUES = st.sampled_from([math.nan, math.inf, -math.inf, 1.5, 7, None, True, "NaN", "\u2028", "\x00"])
VALUES = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(VALUES)
def test_json_of_any_numbers_is_strict_and_whole(value):
    document = {"a": value, "b": math.nan}
    with tempfile.TemporaryDirectory() as folder:
        files.write_json(Path(folder) / "x.json", document)
        text = (Path(folder) / "x.json").read_text()
        assert [path.name for path in Path(folder).iterdir()] == ["x.json"]
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found == without_nan(json.loads(json.dumps(document))) and found["b"] is None
    assert json.loads(files.strict_json(document)) == found and "\n" not in files.strict_json(document)


def without_nan(value):
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(without_nan, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
