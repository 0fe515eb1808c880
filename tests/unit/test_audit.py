"""What the audit counts is what is trained on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig

from zero_recipes.cli import main as cli
from zero_recipes.data.audit import audit, audit_findings
from zero_recipes.data.prepare import finish, tokenise
from zero_recipes.data.splits import prepare_split

BASE = Path(__file__).resolve().parents[2] / "tiny_world" / "base"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def arguments(tmp_path, **keys):
    sound = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False}
    return SFTConfig(output_dir=str(tmp_path), **(sound | keys))


def audited(rows: list[dict], tokenizer, tmp_path, **keys):
    training_args, data = arguments(tmp_path, **keys), Dataset.from_list(rows)
    tokens = tokenise(data, tokenizer, training_args)
    ready = finish(tokens, tokenizer, training_args, training_args.packing)
    found = audit(data, tokens, ready, tokenizer, training_args)
    return found, audit_findings(found, data, tokenizer)


def test_truncated_and_dropped_rows(tokenizer, tmp_path):
    rows = [{"prompt": "The fish", "completion": " hums."}, {"prompt": "The fish " * 40, "completion": " hums."}]
    found, findings = audited(rows, tokenizer, tmp_path, max_length=20)
    assert (found.rows, found.truncated, found.dropped, findings) == (2, 1, 1, [])
    assert audited(rows, tokenizer, tmp_path, max_length=2)[1][0].code == "ZR513"


@pytest.mark.parametrize("seed", range(3))
def test_a_max_length_that_cuts_more_than_slips_is_said_with_those_that_hold_the_rows(seed, tokenizer, tmp_path):
    draw = random.Random(seed)
    rows = [{"text": "The fish hums. " * draw.choice([1, 5, 20])} for _ in range(100)] + [{"text": "The fish " * 300}]
    whole = [len(ids) + 1 for ids in tokenizer([row["text"] for row in rows])["input_ids"]]
    longest, cut = max(whole), sum(length > 40 for length in whole)
    split = prepare_split(Dataset.from_list(rows), tokenizer, arguments(tmp_path, max_length=40), False, False)
    (finding,) = [finding for finding in split[3] if finding.code == "ZR553"]
    assert finding.level == "warning" and f"max_length 40 cuts {cut} of 101 rows" in finding.what
    held = -(-longest // 64) * 64
    assert f"max_length: {held} holds every row (the longest has {longest} tokens)" in finding.fix
    most = -(-sorted(whole)[99] // 64) * 64
    assert f"; {most} holds 99 % of them" in finding.fix
    for keys in ({"max_length": held}, {"max_length": None}, {"max_length": max(w for w in whole if w < longest)},
                 {"max_length": 40, "packing": True, "packing_strategy": "bfd_split"}):  # fmt: skip
        found = prepare_split(Dataset.from_list(rows), tokenizer, arguments(tmp_path, **keys), "packing" in keys, False)
        assert "ZR553" not in [finding.code for finding in found[3]], keys


def test_rows_without_any_loss_are_an_error_with_their_number(tokenizer, tmp_path):
    ids = tokenizer("The fish hums.")["input_ids"]
    rows = [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": [-100] * len(ids)}]
    found, findings = audited(rows, tokenizer, tmp_path)
    assert found.without_supervision == [1]
    assert (findings[0].code, findings[0].level) == ("ZR512", "error") and "the first is row 1" in findings[0].what
    assert found.unsupervised_ends == 2 and any("learn to stop" in finding.why for finding in findings)


def test_a_prompt_that_merges_with_its_answer_is_named(tokenizer, tmp_path):
    apart = [{"prompt": "The fish", "completion": " hums."}]
    assert audited(apart, tokenizer, tmp_path)[0].shifted_prompts == 0
    joined = [{"prompt": "The fi", "completion": "sh hums."}]
    found, findings = audited(joined, tokenizer, tmp_path)
    assert found.shifted_prompts == 1 and (findings[0].code, findings[0].level) == ("ZR515", "warning")


def test_packing_fills_what_padding_wastes(tokenizer, tmp_path):
    rows = [{"text": "The fish hums. " * (1 + i % 7)} for i in range(70)]
    plain = audited(rows, tokenizer, tmp_path, max_length=64)[0]
    packed = audited(rows, tokenizer, tmp_path, max_length=64, packing=True)[0]
    assert plain.packing_share is None and packed.padding_share == 0.0
    assert plain.padding_share > 0.1 and 0.9 < packed.packing_share <= 1.0


def test_check_data_shows_the_table_and_three_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(BASE.parents[1])
    assert cli.main(["check", "recipes/tiny.yaml", "--data", "--output_dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "supervised tokens" in said and said.count("### Response:") == 3


def test_much_padding_is_said_with_what_it_costs():
    from types import SimpleNamespace

    from zero_recipes.data.padding import padding_findings

    def codes(share, rows=1000, strategy="random"):
        arguments = SimpleNamespace(train_sampling_strategy=strategy)
        return list(padding_findings(SimpleNamespace(padding_share=share, rows=rows), arguments))

    (finding,) = codes(0.36)
    assert finding.code == "ZR563" and finding.level == "warning" and "1.6 times fewer" in finding.why
    assert not codes(0.19) and not codes(0.36, rows=999) and not codes(0.36, strategy="group_by_length")
