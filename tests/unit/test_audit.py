"""What the audit counts is what is trained on, and what it finds is said with the number that helps."""

from pathlib import Path

import pytest
from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, arguments
from zero_recipes.cli import main as cli
from zero_recipes.data.audit import audit, holding, overlap_findings
from zero_recipes.data.prepare import finish, prepare_split

EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def audited(rows: list[dict], tokenizer, folder: Path, **keys):
    """(audit, {code: finding}) of rows."""
    training_args = arguments(folder, **keys)
    split, findings = prepare_split(Dataset.from_list(rows), tokenizer, training_args, training_args.packing)
    return split.audit, {finding.code: finding for finding in findings}


def test_a_max_length_that_cuts_more_than_slips_is_said_with_one_that_holds_the_rows(tokenizer, tmp_path):
    rows = [{"text": "The fish hums. " * n} for n in [1, 5, 20, 5] * 25] + [{"text": "The fish " * 300}]
    whole = sorted(len(ids) + 1 for ids in tokenizer([row["text"] for row in rows])["input_ids"])
    finding = audited(rows, tokenizer, tmp_path, max_length=40)[1]["ZR553"]
    assert f"max_length 40 truncates {sum(length > 40 for length in whole)} of 101 rows" in finding.what
    assert f"max_length: {holding(whole[-1])} holds every row (the longest has {whole[-1]} tokens)" in finding.fix
    assert holding(whole[-1]) % 64 == 0 and whole[-1] <= holding(whole[-1]) < whole[-1] + 64
    for keys in ({"max_length": holding(whole[-1])}, {"max_length": None}, {"max_length": whole[-2]},
                 {"max_length": 40, "packing": True, "packing_strategy": "bfd_split"}):  # fmt: skip
        assert "ZR553" not in audited(rows, tokenizer, tmp_path, **keys)[1], keys


def test_ends_that_are_not_learned_are_said(tokenizer, tmp_path):
    found, findings = audited([{"prompt": "The fish", "completion": " hums."}], tokenizer, tmp_path)
    assert (found.unsupervised_ends, findings) == (0, {})
    ids = tokenizer("The fish hums.")["input_ids"]
    found, findings = audited([{"input_ids": ids, "labels": ids}] * 2, tokenizer, tmp_path)
    assert found.unsupervised_ends == 2 and "learn to stop" in findings["ZR514"].why


def test_check_data_shows_the_table_and_three_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(BASE.parents[1])
    assert cli.main(["check", "recipes/tiny.yaml", "--data", "--output_dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "supervised tokens" in shown and shown.count("### Response:") == 3


def as_dataset(rows: list[dict], kind: str = "int64") -> Dataset:
    return Dataset.from_list(rows, features=Features({"input_ids": List(Value(kind)), "labels": List(Value(kind))}))


def counted_slowly(rows: list[dict], ready: list[dict], longest: int | None) -> dict:
    short = [row for row in rows if longest is None or len(row["input_ids"]) <= longest]
    unsupervised_ends = 0
    for row in short:
        ends = [place for place, token in enumerate(row["input_ids"]) if token == EOS]
        unsupervised_ends += not ends or row["labels"][ends[-1]] == -100
    supervised = 0
    for row in ready:
        firsts, place = set(), 0
        for length in row.get("seq_lengths", [len(row["input_ids"])]):
            firsts.add(place)
            place += length
        supervised += sum(label != -100 and place not in firsts for place, label in enumerate(row["labels"]))
    return {
        "rows": len(rows),
        "truncated": len(rows) - len(short),
        "without_supervision": [n for n, row in enumerate(rows) if all(label == -100 for label in row["labels"])],
        "longest": max(len(row["input_ids"]) for row in rows),
        "unsupervised_ends": unsupervised_ends,
        "tokens": sum(len(row["input_ids"]) for row in ready),
        "supervised": supervised,
    }


@st.composite
def token_rows(draw):
    """Rows of any lengths and labels: none, some or all supervised, the end of text within; more than a batch."""
    rows = []
    for ids in draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=9)):
        share = draw(st.sampled_from([[0], [0, 1], [1]]))
        rows.append({"input_ids": ids, "labels": [id if draw(st.sampled_from(share)) else -100 for id in ids]})
    return rows * draw(st.sampled_from([1, 150]))


def test_the_audit_counts_what_a_loop_over_tokens_counts(tokenizer, tmp_path):
    assert tokenizer.eos_token_id == EOS

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @example([{"input_ids": [5], "labels": [5]}, {"input_ids": [EOS, 5], "labels": [EOS, 5]}], None, None)
    @given(token_rows(), st.sampled_from([None, 3, 20]), st.sampled_from([None, "bfd", "bfd_split", "wrapped"]))
    def holds(rows, longest, strategy):
        packing = strategy is not None and longest is not None
        keys = {"max_length": longest, "packing": packing, "packing_strategy": strategy or "bfd"}
        training_args = arguments(tmp_path, **keys)
        tokenised = as_dataset(rows, "int32")
        ready = finish(tokenised, tokenizer, training_args, packing)
        twice = concatenate_datasets([tokenised, tokenised])  # an index over Arrow's rows, and several chunks
        tokenised = twice.select(range(len(rows) - 1, -1, -1))
        found, kept = audit(tokenised, tokenised, ready, tokenizer, training_args), [dict(row) for row in ready]
        expected = counted_slowly(rows[::-1], kept, longest)
        assert {name: getattr(found, name) for name in expected} == expected
        assert found.dropped == (0 if packing else len(rows) - len(kept))

    holds()


def test_rows_that_are_in_both_splits_are_found():
    training = as_dataset(
        [{"input_ids": [7], "labels": [7]}] * 1100 + [{"input_ids": [7, 8], "labels": [7, 8]}], "int32"
    )
    other = {"input_ids": [9, 7, 8], "labels": [1, 1, 1]}
    evaluation = as_dataset([other, {"input_ids": [7, 8], "labels": [-100, 8]}, other])
    (finding,) = overlap_findings(training, evaluation, "test")
    assert "1 of 3 rows of test" in finding.what and "the first is row 1" in finding.what
    assert not list(overlap_findings(training, evaluation.select([0, 2]), "test"))
