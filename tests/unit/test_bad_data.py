"""Data that is wrong inside is refused by file, row and column before a model is loaded; sound data is not."""

from __future__ import annotations

import random

import datasets
import pytest

from tests.helpers.bad_data import PAIRS, SOUND, TEXTS, lines, parquet, prepared
from tests.helpers.bad_data_table import TABLE
from tests.helpers.drawn_data import broken_bytes, drawn
from zero_recipes.core.findings import Refusal

ROW_CODES = ("ZR501", "ZR508", "ZR512", "ZR522", "ZR523", "ZR524", "ZR525", "ZR526", "ZR528", "ZR531", "ZR533", "ZR536")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder(tmp_path, files):
    data = tmp_path / "data"
    data.mkdir()
    for name, content in files.items():
        (data / name).write_bytes(content)
    return data


def test_the_names_differ():
    assert len({bad.name for bad in TABLE}) == len(TABLE) >= 100


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_bad_data_is_found_with_its_place(tmp_path, bad):
    found = prepared(folder(tmp_path, bad.files), **bad.keys)
    assert {(finding.code, finding.level) for finding in found} == {(bad.code, bad.level)}, found
    assert all(words in found[0].what for words in bad.said), found[0]
    assert all(finding.why and finding.fix for finding in found)


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("streams", [False, True])
def test_sound_data_is_taken(tmp_path, kind, streams):
    keys = {"dataset_format": "alpaca"} if kind == "alpaca" else {}
    keys |= {"dataset_streaming": True, "max_steps": 1} if streams else {}
    assert prepared(folder(tmp_path, {"train.jsonl": lines(SOUND[kind])}), **keys) == []


def test_an_input_that_is_empty_or_null_is_alpacas_own(tmp_path):
    content = b'instruction,input,output\n"a, b",,c\n"a\nb",x,c\n'
    assert prepared(folder(tmp_path, {"train.csv": content}), dataset_format="alpaca") == []


def test_tool_calls_need_no_content(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    rows = [{"messages": [{"role": "user", "content": "a"}, calls, {"role": "tool", "content": "5"}]}] * 3
    assert prepared(folder(tmp_path, {"train.jsonl": lines(rows)})) == []


def test_empty_answers_may_be_meant(tmp_path):
    data = folder(tmp_path, {"train.jsonl": lines([row | {"completion": ""} for row in PAIRS])})
    (found,) = prepared(data, ignore=["ZR533"])
    assert (found.level, found.ignored) == ("warning", True)
    assert prepared(data)[0].level == "error", "what was ignored is not kept for a run that ignores nothing"


def test_the_rows_of_a_mixture_are_named_by_their_file(tmp_path):
    data = folder(tmp_path, {"a.jsonl": lines(TEXTS), "b.parquet": parquet([*TEXTS[:2], {"text": None}])})
    mixture = [
        {"path": "json", "data_files": str(data / "a.jsonl")},
        {"path": "parquet", "data_files": str(data / "b.parquet")},
    ]
    (found,) = prepared(data, datasets=mixture)
    assert found.code == "ZR524" and f"row 22 of train ({data / 'b.parquet'})" in found.what


def test_a_stream_that_goes_wrong_later_is_refused_at_its_row(tmp_path):
    rows = [{"text": f"The fish {i} hums."} for i in range(1200)] + [{"text": None}]
    data = folder(tmp_path, {"train.jsonl": lines(rows)})
    from types import SimpleNamespace

    from trl import DatasetMixtureConfig, ScriptArguments

    from zero_recipes.data.load import load_rows

    script = ScriptArguments(dataset_name=str(data), dataset_streaming=True)
    training = SimpleNamespace(seed=0, eval_strategy="no", dataset_text_field="text", assistant_only_loss=False)
    train, _ = load_rows(script, training, DatasetMixtureConfig(), None)
    with pytest.raises(Refusal, match=r"row 1200 of train \(.*train.jsonl line 1201\).*ZR524"):
        list(train)


def test_a_long_row_says_that_it_takes_a_while(tmp_path, capsys):
    rows = [*TEXTS[:3], {"text": "The fish hums. " * 70_000}]
    assert prepared(folder(tmp_path, {"train.jsonl": lines(rows)})) == []
    assert "row 3 of train" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_wrong_row_is_found(tmp_path, seed):
    draw = random.Random(seed)
    keys, number, column = drawn(tmp_path / "data", draw)
    errors = [finding for finding in prepared(tmp_path / "data", **keys) if finding.level == "error"]
    assert errors and all(finding.code in ROW_CODES for finding in errors), (keys, number, column, errors)
    placed = f"row {number} of " in errors[0].what or f"line {number + 1}" in errors[0].what
    assert placed or "rows are like it" in errors[0].what or errors[0].code not in ("ZR524", "ZR525", "ZR526")


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_more_drawn_wrong_rows(tmp_path, seed):
    test_a_drawn_wrong_row_is_found(tmp_path, seed)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_bytes_end_in_findings(tmp_path, seed):
    broken_bytes(tmp_path / "data", random.Random(seed))
    assert all(finding.code.startswith("ZR5") for finding in prepared(tmp_path / "data"))


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_more_drawn_bytes(tmp_path, seed):
    test_drawn_bytes_end_in_findings(tmp_path, seed)
