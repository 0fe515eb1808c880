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

from zero_recipes.data.samples import Sample
from zero_recipes.metrics.read_runs import read_samples
from zero_recipes.report.judge import JUDGED_SCORES
from zero_recipes.training.samples import Answers, sample_rows, show_samples, text_scores, write_rows

HOSTILE = ["[/INST]", "[bold]x", "[link=file:///x]y[/link]", "\\[red]", "\\", ":smile:", "", "\x1b[2J\x1b]0;title\x07"]
HOSTILE += ["\r", "\x00", "\b\b\b", "\u202ereversed\u202c", "שלום", "語" * 90, "\u2028", "e\u0301" * 50, "x" * 5_000]
HOSTILE += ["\t\n\n", "👩‍👩‍👧‍👦", "\ufeff", "\x85", "�"]
TEXT = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=20), max_size=4).map("".join)  # no half of a surrogate pair
LOSS = st.sampled_from([None, math.nan, math.inf, 0.5, 3.0])


@settings(max_examples=15)
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
        known = reference is not None and loss in (0.5, 3.0)
        assert row.scores_after.get("reference_loss") == (loss if known else None)
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)  # of few characters
    with contextlib.redirect_stdout(screen):
        show_samples(rows, "from [/a] file")
    printed = screen.buffer.getvalue().decode()
    assert "[/a]" in printed and "\x1b" not in printed and "\x00" not in printed


def test_scores():
    assert text_scores(" The fish hums.", "The fish hums.") == {"exact_match": 1.0, "token_f1": 1.0}
    assert text_scores("The cat hums.", "The fish hums.") == {"exact_match": 0.0, "token_f1": pytest.approx(2 / 3)}
