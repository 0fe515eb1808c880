"""Samples: whatever people and models write is printed, written and read again; the tokens are training's own."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from datasets import Dataset
from rich.console import Console
from transformers import AutoTokenizer
from trl import SFTConfig

from tests.helpers.tiny import ROOT
from zero_recipes.core import files, tables
from zero_recipes.core.findings import Refusal
from zero_recipes.data.load import alpaca_row
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask
from zero_recipes.data.splits import finish, tokenise, with_tokens
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


# the tokens of prompt and answer


def arguments(tmp_path, **keys) -> SFTConfig:
    return SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **keys)


def trained(row, tokenizer, training_args):
    """input_ids and labels of one row as training prepares it; two empty tuples of a row that it drops."""
    rows = Dataset.from_list([row])
    ready = finish(tokenise(rows, tokenizer, training_args), tokenizer, training_args, packing=False)
    return (tuple(ready[0]["input_ids"]), tuple(ready[0]["labels"])) if len(ready) else ((), ())


def same_tokens(tokenizer, tmp_path, seed):
    draw = random.Random(seed)
    words = ["Once", "upon", " a", "time,", "\n", "fox", " ", "dog.", "", "x1", "Ünï", "語", "</s>", "  "]

    def text(most: int) -> str:
        return draw.choice(["", " "]).join(draw.choices(words, k=draw.randint(0, most)))

    rows = [{"prompt": text(12), "completion": text(8)} for _ in range(8)]
    keys = {"max_length": draw.choice([None, 1, 4, 9, 30]), "packing": False, "shuffle_dataset": True}
    training_args = arguments(tmp_path, **keys, truncation_mode=draw.choice(["keep_start", "keep_end"]))
    samples = choose_samples(8, Dataset.from_list(rows), None, tokenizer)
    asked = with_tokens([*samples, Sample("no answer", None)], tokenizer, training_args)
    assert asked[-1].ids == () and all(sample.row is None for sample in asked)
    for sample, row in zip(asked, rows, strict=False):
        assert (sample.ids, sample.labels) == trained(row, tokenizer, training_args)


@pytest.mark.parametrize("seed", range(4))
def test_a_samples_tokens_are_those_of_a_training_row(tmp_path, seed):
    same_tokens(AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base"), tmp_path, seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_samples_tokens_are_those_of_a_training_row_where_spaces_are_marked(tmp_path, fixtures, seed):
    tokenizer = AutoTokenizer.from_pretrained(fixtures / "stories260K")
    same_tokens(tokenizer, tmp_path, seed)
    (sample,) = with_tokens(
        [Sample("a", "b", row={"prompt": "a\n", "completion": "b"})], tokenizer, arguments(tmp_path)
    )
    apart = tokenizer("a\n")["input_ids"] + tokenizer("b</s>", add_special_tokens=False)["input_ids"]
    assert list(sample.ids) != apart, "this tokenizer writes an answer alone as it writes it behind a prompt"


# where samples come from


def loads(tmp_path, **changes):
    script = SimpleNamespace(
        dataset_name=str(tmp_path),
        dataset_config=None,
        dataset_streaming=False,
        dataset_train_split="train",
        dataset_test_split="test",
    )
    training = SimpleNamespace(seed=0, eval_strategy="no", dataset_text_field="text", trust_remote_code=False)
    vars(script).update(changes)
    return script, training, SimpleNamespace(datasets=[]), "alpaca"


def test_samples_come_from_the_test_split_though_nothing_is_evaluated(tmp_path):
    rows = {split: {"instruction": f"Say {split}.", "input": "", "output": split} for split in ("train", "test")}
    (tmp_path / "train.jsonl").write_text(json.dumps(rows["train"]) + "\n")
    loaded = loads(tmp_path)
    assert rows_to_ask(1, None, *loaded) is None, "there is no such split"
    with pytest.raises(Refusal, match=r"'test'.*ZR516"):
        choose_samples(1, rows_to_ask(1, None, *loaded), "alpaca", None, "test")
    (tmp_path / "test.jsonl").write_text(json.dumps(rows["test"]) + "\n")
    (sample,) = choose_samples("1", rows_to_ask("1", None, *loaded), "alpaca", None, "test")
    assert sample.prompt == alpaca_row(rows["test"])["prompt"] and sample.source == "the split 'test'"
    evaluation = Dataset.from_list([{"prompt": "a", "completion": "b"}])
    assert rows_to_ask(1, evaluation, *loaded) is evaluation
    assert (
        rows_to_ask(None, None, *loaded) is rows_to_ask(["a"], None, *loaded) is rows_to_ask("x", None, *loaded) is None
    )
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(Refusal, match="ZR501"):
        rows_to_ask(1, None, *loaded)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (b'{"prompt": "a"', "ZR422", "line 1"),
        (b'\n\n"a"\n', "ZR422", "line 3"),
        (b"[" * 100_000, "ZR422", "line 1"),
        (b'{"prompt": "\xe9"}', "ZR423", "utf-8"),
        (b'{"prompt": null}', "ZR757", "line 1"),
        (b'{"prompt": "a", "completion": 1.5}\n{"prompt": {"a": 1}}', "ZR757", "line 2"),
        (b'{"prompt": "\\udfff"}', "ZR757", "line 1"),
        (b'{"messages": []}', "ZR424", "line 1"),
        (b'{"messages": "a"}', "ZR519", "messages"),
        (b'{"question": "a"}', "ZR519", "question"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_read_is_refused(tmp_path, text, code, said):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text)
    with pytest.raises(Refusal) as caught:
        choose_samples(str(path), None, None, tokenizer)
    assert caught.value.codes == [code] and said in str(caught.value)
