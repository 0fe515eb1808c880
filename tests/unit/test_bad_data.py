"""Data that is wrong inside is refused with its row, or its file and line, before a model is loaded."""

import csv
import gzip
import shlex
import tempfile
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.bad_data import CHATML, SOUND, found_in, lines, prepared, with_row, written
from tests.helpers.tools import refusal_of

ALPACA, PAIRS, TEXTS, CHATS, IDS, _ = SOUND.values()
AS_ALPACA = {"dataset_format": "alpaca"}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
STREAMS = {"dataset_streaming": True, "max_steps": 1}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
LONG = {"prompt": "The fish " * 60, "completion": "x"}
NEEDS_USER = "{% if messages[0].role == 'assistant' %}{{ raise_exception('must begin with user') }}{% endif %}" + CHATML
HEADER = b"instruction,input,output\n"
ROW = "row 7 of train"


def eighth(rows, **changes):
    return lines(with_row(rows, 7, **changes))


# (what is wrong, file or {name: content}, code, words of the finding, the recipe's keys)
TABLE = [
    ("an answer is null", eighth(ALPACA, output=None), "ZR524", [ROW, "output is None"], AS_ALPACA),
    ("a short CSV record", {"train.csv": HEADER + b"a,b,c\na,b\n"}, "ZR533", ["1 of 2", "first is row 1"], AS_ALPACA),
    ("a text is null", eighth(TEXTS, text=None), "ZR524", [ROW, "text is None, not text"], {}),
    ("texts that pyarrow takes for dates", lines([{"text": "2020-01-01"}] * 4), "ZR524", ["row 0", "datetime"], {}),
    ("a null in the second file", {"a.jsonl": lines(TEXTS), "b.jsonl": lines(with_row(TEXTS, 2, text=None))}, "ZR524",
     ["row 22 of train"], {}),
    ("a null to evaluate", {"train.jsonl": lines(PAIRS), "test.jsonl": eighth(PAIRS, completion=None)}, "ZR524",
     ["row 7 of test"], EVALUATES),
    ("a stream with a null", eighth(TEXTS, text=None), "ZR524", [ROW], STREAMS),
    ("a chat is empty", eighth(CHATS, messages=[]), "ZR524", [ROW, "not a list of messages"], {}),
    ("a chat is a text", eighth(CHATS, messages="hi"), "ZR524", [ROW], {"dataset_num_proc": 2}),
    ("no content", eighth(CHATS, messages=[USER | {"content": None}]), "ZR524",
     [ROW, "message 0 of messages (user) has no content"], {}),
    ("the columns of nobody", lines([{"a": "b"}] * 3), "ZR508", ["unknown columns: a", "dataset_format: alpaca"], {}),
    ("no input column", lines([{"instruction": "a", "output": "b"}]), "ZR508", ["instruction (text), output (text)"],
     AS_ALPACA),
    ("texts named ids", lines(TEXTS), "ZR508", ["input_ids"], {"dataset_kwargs": {"skip_prepare_dataset": True}}),
    ("CSV records that are long", {"train.csv": HEADER + b"a,b,c,d\n"}, "ZR508",
     ["instruction, input, output", "CSV header"], AS_ALPACA),
    ("rows that all have weight 0", lines([row | {"weight": 0} for row in PAIRS]), "ZR523", ["train has no rows"], {}),
    ("no turns", lines(TEXTS), "ZR431", ["text"], {"assistant_only_loss": True}),
    ("no template", lines(CHATS), "ZR890", ["messages, as they are"], {"template": None}),
    ("a row that the template stops at", eighth(CHATS, messages=[ANSWER]), "ZR199",
     ["must begin with user", f"writing {ROW}, message 0 (assistant), with the chat template"],
     {"template": NEEDS_USER, "dataset_num_proc": 2}),
    ("ShareGPT's roles", lines([{"conversations": [{"from": who, "value": "a"} for who in ("human", "gtp")]}] * 8),
     "ZR524", ["row 0 of train: message 1 of conversations has the unknown role 'gtp'; known are", "gpt"], {}),
    ("one chat of users in 121", lines([*CHATS * 6, {"messages": [USER]}]), "ZR533w", ["1 of 121", "row 120"], {}),
    ("a blank answer", eighth(PAIRS, completion=" \n"), "ZR533", ["1 of 20 rows", "row 7"], {}),
    ("an empty CSV cell", {"train.csv": b"question,answer\na,\nx,y\n"}, "ZR533",
     ["1 of 2 rows", "row 0, question as the user's turn, answer as the assistant's"], {}),
    ("silent assistants", lines([{"messages": [USER, ANSWER | {"content": ""}]}] * 8), "ZR533", ["8 of 8"], STREAMS),
    ("an empty text", eighth(TEXTS, text=""), "ZR533w", ["1 of 20", "row 7"], {}),
    ("most answers too late", lines([LONG] * 19 + PAIRS[:1]), "ZR553w", ["truncates 19 of 20", "every row whole"], {}),
    ("all answers too late", lines([LONG] * 19), "ZR513", ["train has no supervised tokens", "max_length 64"], {}),
    ("no label", lines([*IDS, IDS[0] | {"labels": [-100] * 4}]), "ZR512", ["1 rows", "first is row 20"], {}),
    ("a label for the first token alone", lines([*IDS, IDS[0] | {"labels": [5, -100, -100, -100]}]), "ZR512",
     ["1 rows", "first is row 20"], {}),
    ("rows of one token", lines([{"input_ids": [5]}] * 9), "ZR513", ["train has no supervised tokens"], {}),
    ("ids beyond the vocabulary", eighth(IDS, input_ids=[5, 99999, 1, 0]), "ZR525", [ROW, "holds 99999"], {}),
    ("labels of -1", eighth(IDS, labels=[5, 6, 7, -1]), "ZR525", [ROW, "labels holds -1"], {}),
    ("no ids", eighth(IDS, input_ids=[]), "ZR525", [ROW, "0 tokens"], {}),
    ("short masks", lines([{"input_ids": [5, 6], "completion_mask": [1]}]), "ZR525", ["1 entries for 2 tokens"], {}),
    ("a cut line", lines(TEXTS[:4]) + b'{"text": "x", \n' + lines(TEXTS), "ZR522", ["train.jsonl line 5: "], {}),
    ("a number for a row", lines(TEXTS) + b"5\n", "ZR522", ["line 21: not an object"], {}),
    ("a mistake in a list", {"train.json": b'[{"text": "a"},\n{"text" "a"}]'}, "ZR522", ["train.json line 2"], {}),
    ("a cut archive", {"train.jsonl.gz": gzip.compress(lines(TEXTS * 50))[:-40]}, "ZR522", ["train.jsonl.gz line"], {}),
    ("a stream with a cut line", lines(TEXTS[:4]) + b'{"text": "x', "ZR522", ["train.jsonl line 5"], STREAMS),
    ("a split without rows", {"train.jsonl": lines(TEXTS), "test.jsonl": b"\n"}, "ZR506", ["no data"], EVALUATES),
    ("training rows to evaluate", {"train.jsonl": lines(PAIRS), "test.jsonl": lines([TEXTS[0] and LONG, *PAIRS[3:5]])},
     "ZR538w", ["2 of 3 rows of test", "row 1"], EVALUATES | {"max_length": 256}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(("files", "code", "words", "keys"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_bad_data_is_found_with_its_place(tmp_path, files, code, words, keys):
    data = written(tmp_path, files if isinstance(files, dict) else {"train.jsonl": files})
    found = found_in(data, **keys)
    level = "warning" if code.endswith("w") else "error"
    assert {(finding.code, finding.level) for finding in found} == {(code[:5], level)}, found
    assert all(word in str(found[0]) for word in words), found[0]


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("streams", [False, True])
def test_sound_data_is_taken(tmp_path, kind, streams):
    keys = (AS_ALPACA if kind == "alpaca" else {}) | (STREAMS if streams else {})
    assert found_in(written(tmp_path, {"train.jsonl": lines(SOUND[kind])}), **keys) == []


def test_what_may_be_empty_is_taken(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    rows = [{"messages": [USER, calls, {"role": "tool", "content": "5"}]}] * 3
    writes_calls = CHATML.replace("{{ m['content'] }}", "{{ m['content'] or '' }}{{ m['tool_calls'] | tojson }}", 1)
    assert found_in(written(tmp_path, {"train.jsonl": lines(rows)}), template=writes_calls) == []
    (tmp_path / "csv").mkdir()
    content = b'instruction,input,output\n"a, b",,c\n"a\nb",x,c\n'
    assert found_in(written(tmp_path / "csv", {"train.csv": content}), **AS_ALPACA) == []


def test_the_files_of_a_mixture_are_looked_into(tmp_path):
    data = written(tmp_path, {"a.jsonl": lines(TEXTS), "b.jsonl": lines(TEXTS[:2]) + b'{"text"'})
    mixture = [{"path": "json", "data_files": str(data / name)} for name in ("a.jsonl", "b.jsonl")]
    (found,) = found_in(data, datasets=mixture)
    assert found.code == "ZR522" and f"{data / 'b.jsonl'} line 3" in found.what


# any wrong row

WRONG = st.sampled_from([None, 5, -1.5, True, ["a"], [], {"a": 1}, {}, [None], [[1]], ...])
WRONG_IDS = st.sampled_from([None, 5, "a", [], [-1], [10**6], [None], [1.5], ["a"], ...])
WRONG_CHATS = st.sampled_from(
    [None, "a", 5, [], [None], ["a"], [{}], [{"role": "user"}], [{"content": "a"}], [{"role": None, "content": "a"}]]
)
KEYS = st.sampled_from([{}, {"dataset_num_proc": 2}, STREAMS, {"packing": True}])


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.grid)])
def test_any_wrong_row_is_found(examples):
    @settings(max_examples=examples)
    @given(st.data())
    def holds(data):
        kind, number = data.draw(st.sampled_from(sorted(SOUND))), data.draw(st.integers(0, 19))
        column = data.draw(st.sampled_from([name for name in SOUND[kind][0] if name != "input"]))
        wrong = WRONG_IDS if kind == "ids" else WRONG_CHATS if kind in ("chats", "sharegpt") else WRONG
        rows, keys = with_row(SOUND[kind], number, **{column: data.draw(wrong)}), {**data.draw(KEYS)}
        with tempfile.TemporaryDirectory() as folder:
            keys |= AS_ALPACA if kind == "alpaca" else {}
            found = found_in(written(Path(folder), {"train.jsonl": lines(rows)}), **keys)
        assert any(finding.level == "error" for finding in found), (kind, rows, keys)

    holds()


def test_errors_that_the_recipe_ignores_are_warnings_also_of_rows_that_are_kept(tmp_path):
    data = written(tmp_path, {"train.jsonl": lines([row | {"completion": ""} for row in PAIRS])})
    for _ in range(2):  # made, and found in the cache
        (found,) = found_in(data, ignore=["ZR533"])
        assert (found.level, found.ignored) == ("warning", True)
    assert refusal_of(prepared, data).codes == ["ZR533"], "what one run ignores, another does not"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_fix_of_empty_answers_copies_the_other_rows_whatever_else_is_empty(tmp_path, monkeypatch, separator):
    """An unused column is half empty, as in most tables; the file itself stays as it is."""
    cells = [("ask", "reply", "note")]
    cells += [(f"Say {i}.", "" if i < 10 else f"Word, {i}; NA", "" if i % 2 else "seen") for i in range(40)]
    data = tmp_path / "rows.csv"
    with data.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(cells)
    before = data.read_bytes()
    monkeypatch.chdir(tmp_path)
    keys = {"columns": {"question": "ask", "answer": "reply"}, "dataset_format": None}
    refused = refusal_of(prepared, Path("rows.csv"), **keys)
    assert refused.codes == ["ZR533"] and refused.what.startswith("10 of 40 rows")
    command = refused.fix.partition("python -c ")[2].partition(". Then name filled/rows.csv in the recipe")[0]
    exec(*shlex.split(command), {})
    assert data.read_bytes() == before
    with Path("filled/rows.csv").open(newline="") as file:
        assert [tuple(row) for row in csv.reader(file, delimiter=separator)] == [cells[0], *cells[11:]]
    assert prepared(Path("filled/rows.csv"), **keys).rows == 30
    with pytest.raises(FileExistsError):
        exec(*shlex.split(command), {})


def test_the_fix_of_empty_answers_names_no_csv_file_for_other_data(tmp_path):
    data = written(tmp_path, {"train.jsonl": lines([row | {"completion": ""} for row in PAIRS])})
    assert "python" not in refusal_of(prepared, data).fix
