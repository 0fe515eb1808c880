"""What is counted and hashed off Arrow's buffers is what a loop over rows and tokens finds; rows are made once."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pytest
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import AutoTokenizer
from trl import ScriptArguments, SFTConfig
from trl.scripts.utils import DatasetMixtureConfig

from zero_recipes.checkpoint.compatibility import refuse_other_data
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host_limits import Host
from zero_recipes.core.process import environment_kept
from zero_recipes.data import prepare, row_hash, splits, token_columns
from zero_recipes.data.audit import _shifted_prompts, audit, overlap_findings
from zero_recipes.data.row_hash import data_sha256

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "tiny_world" / "base"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def arguments(tmp_path, **keys) -> SFTConfig:
    sound = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False, "max_length": 20}
    return SFTConfig(output_dir=str(tmp_path), **(sound | keys))


def drawn_rows(chance: random.Random, eos: int, empty: bool = True) -> list[dict]:
    """Rows of random lengths and labels; some empty, some without any loss, some with the end of text within."""
    rows = []
    for _ in range(chance.choice([1, 7, 1500])):
        length = chance.choice([0 if empty else 1, 1, 2, chance.randrange(1, 40)])
        ids = [chance.choice([eos, chance.randrange(5, 300)]) for _ in range(length)]
        share = chance.choice([0, 0.5, 1])
        rows.append({"input_ids": ids, "labels": [t if chance.random() < share else -100 for t in ids]})
    return rows


def row(*ids: int, labels: list[int] | None = None) -> dict:
    return {"input_ids": list(ids), "labels": list(ids) if labels is None else labels}


def as_dataset(rows: list[dict], kind: str = "int64") -> Dataset:
    features = Features({"input_ids": List(Value(kind)), "labels": List(Value(kind))})
    return Dataset.from_list(rows, features=features)


def counted_slowly(rows: list[dict], ready: list[dict], eos: int, longest: int | None) -> dict:
    """The audit's numbers by loops over rows and tokens."""
    short = [row for row in rows if longest is None or len(row["input_ids"]) <= longest]
    unsupervised_ends = 0
    for row in short:
        ends = [place for place, token in enumerate(row["input_ids"]) if token == eos]
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


@pytest.mark.parametrize("seed", range(12))
def test_the_audit_counts_what_a_loop_over_tokens_counts(tokenizer, tmp_path, seed):
    chance = random.Random(seed)
    longest = chance.choice([None, 3, 20])
    packing = longest is not None and chance.random() < 0.6
    strategy = chance.choice(["bfd", "bfd_split", "wrapped"])
    keys = {"max_length": longest, "packing": packing, "packing_strategy": strategy}
    training_args = arguments(tmp_path, per_device_train_batch_size=chance.choice([1, 3, 8]), **keys)
    rows = drawn_rows(chance, tokenizer.eos_token_id, empty=not packing)
    tokenised = as_dataset(rows, chance.choice(["int64", "int32"]))
    ready = splits.finish(tokenised, tokenizer, training_args, packing)
    if chance.random() < 0.5:  # an index over Arrow's rows, and several chunks
        tokenised = concatenate_datasets([tokenised, tokenised]).select(range(len(rows) - 1, -1, -1))
        rows = rows[::-1]
    found = audit(tokenised, tokenised, ready, tokenizer, training_args)
    kept = [dict(row) for row in ready]
    expected = counted_slowly(rows, kept, tokenizer.eos_token_id, longest)
    assert {name: getattr(found, name) for name in expected} == expected
    lengths = [len(row["input_ids"]) for row in kept]
    assert token_columns.row_lengths(ready).tolist() == lengths
    if packing:
        assert found.packing_share == pytest.approx(sum(lengths) / (len(kept) * longest)) and not found.padding_share
    assert found.dropped == (0 if packing else len(rows) - len(kept))


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_padding_is_that_of_shuffled_batches(size):
    lengths = np.random.default_rng(size).integers(0, 50, 77)
    shuffled = np.random.default_rng(5).permutation(lengths).tolist()
    batches = [shuffled[at : at + size] for at in range(0, 77, size)]
    expected = 1 - sum(shuffled) / sum(len(batch) * max(batch) for batch in batches)
    assert token_columns.padding_share(lengths, size, seed=5) == pytest.approx(expected)
    assert token_columns.padding_share(np.zeros(3, dtype=int), size, seed=5) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_are_no_prefix_are_counted_as_one_by_one(tokenizer, seed):
    chance = random.Random(seed)
    words = ["The fi", "sh", " hums", ".", " cave", "", "Ö", "The fish hums. " * 9]
    prompts = ["".join(chance.choices(words, k=3)) for _ in range(1200)]
    wholes = [tokenizer(prompt + chance.choice(words))["input_ids"] for prompt in prompts]
    wholes = [ids[: chance.choice([3, 99])] for ids in wholes]
    alone = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = sum(ids[: len(prompt)] != prompt for prompt, ids in zip(alone, wholes, strict=True))
    rows = Dataset.from_dict({"prompt": prompts})
    tokenised = as_dataset([{"input_ids": ids, "labels": ids} for ids in wholes])
    assert 0 < expected < 1200 and _shifted_prompts(rows, tokenised, tokenizer) == expected


def test_rows_that_are_in_both_splits_are_found():
    chance = random.Random(0)
    training, evaluation = drawn_rows(chance, 0, empty=False), [{"input_ids": [999], "labels": [1]}]
    training = as_dataset([*training, {"input_ids": [7, 8], "labels": [7, 8]}], "int32")
    evaluation = as_dataset([*evaluation, {"input_ids": [7, 8], "labels": [-100, 8]}, *evaluation])
    source = SimpleNamespace(split="test", row=str)
    assert "1 of 3 rows" in next(overlap_findings(training, evaluation, source)).what
    assert not list(overlap_findings(training, evaluation.select([0, 2]), source))


@pytest.mark.parametrize("seed", range(4))
def test_the_hash_is_of_values_and_boundaries_alone(seed):
    rows = [*drawn_rows(random.Random(seed), 0), row(4, 5, 6, labels=[4, -100, 6]), row(9)]
    whole = as_dataset(rows)
    digest = data_sha256(whole)
    assert data_sha256(as_dataset(rows, "int32")) == digest  # another width
    half = len(rows) // 2
    chunks = [as_dataset(part) for part in (rows[:half], rows[half:-1], rows[-1:]) if part]
    assert data_sha256(concatenate_datasets(chunks)) == digest  # other chunks
    twice = concatenate_datasets([whole, whole]).select(range(len(rows)))
    assert data_sha256(twice) == digest  # an index
    large = {
        name: whole.data[name].combine_chunks().cast(pa.large_list(pa.int64())) for name in ("labels", "input_ids")
    }
    assert data_sha256(Dataset(pa.table(large))) == digest  # other offsets, columns in another order
    for change in (
        lambda r: r[-2].update(input_ids=[4, 5, 7]),
        lambda r: r[-2].update(labels=[4, -100, -100]),
        lambda r: (r[-2].update(input_ids=[4, 5]), r[-1].update(input_ids=[6, 9])),  # a boundary
        lambda r: r.append({"input_ids": [], "labels": []}),
        lambda r: r.reverse(),
        lambda r: r.pop(),
    ):
        other = copy.deepcopy(rows)
        change(other)
        assert data_sha256(as_dataset(other)) != digest
    assert data_sha256(whole.rename_column("labels", "tags")) != digest
    assert data_sha256(whole.remove_columns("labels")) != digest


def test_the_hash_of_other_columns_and_of_nulls():
    rows = [
        {"a": "x", "b": [1.5, None], "c": {"d": [True]}},
        {"a": None, "b": None, "c": {"d": []}},
        {"a": "yz", "b": [], "c": None},
    ]
    digest = data_sha256(Dataset.from_list(rows))
    assert data_sha256(concatenate_datasets([Dataset.from_list(rows)])) == digest
    for number, key, value in (
        (0, "b", [None, 1.5]),
        (1, "a", ""),
        (1, "b", []),
        (2, "a", "y"),
        (0, "c", {"d": [False]}),
    ):
        other = copy.deepcopy(rows)
        other[number][key] = value
        assert data_sha256(Dataset.from_list(other, features=Dataset.from_list(rows).features)) != digest


def test_a_checkpoint_with_a_hash_of_the_first_version_takes_its_own_rows_alone(tmp_path, monkeypatch):
    chance = random.Random(1)
    rows, others = (as_dataset([*drawn_rows(chance, 0), row(n)]) for n in (1, 2))
    # as the first version computed it, batches of a thousand rows as text
    small = as_dataset([row(1, 2, labels=[-100, 2]), row()])
    assert row_hash.first_version(small) == "49ec800488174212eacb2fe04dc51c506abe8a32bb6067e8d35c382a49e17752"
    now = data_sha256(rows)
    for written, fits, other in ((row_hash.first_version(rows), rows, others), (now, rows, others)):
        monkeypatch.setattr("zero_recipes.checkpoint.manifest.read", lambda folder, then=written: {"data_sha256": then})
        refuse_other_data("checkpoint-1", data_sha256(fits), fits)
        with pytest.raises(Refusal, match="ZR727"):
            refuse_other_data("checkpoint-1", data_sha256(other), other)
    with pytest.raises(Refusal, match="ZR727"):
        refuse_other_data("checkpoint-1", None, None)  # a stream now


@pytest.fixture
def prepared(tmp_path, monkeypatch, tokenizer):
    """prepare_rows over the data of the tiny recipe, kept in a folder of its own; and how often rows were made."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = []
    real = prepare.prepare_splits
    monkeypatch.setattr(prepare, "prepare_splits", lambda *a: made.append(1) or real(*a))
    own = SimpleNamespace(dataset_format="alpaca", sample_prompts=0, ignore=None)

    def rows(**keys):
        training_args = arguments(tmp_path, **({"max_length": 64} | keys))
        script_args = ScriptArguments(dataset_name=str(ROOT / "tiny_world"))
        return prepare.prepare_rows(script_args, training_args, DatasetMixtureConfig(), own, tokenizer), len(made)

    return rows


def test_rows_are_made_again_only_for_what_makes_other_rows(prepared):
    first, made = prepared(per_device_train_batch_size=2)
    assert made == 1
    for keys in (
        {"per_device_train_batch_size": 16},
        {"seed": 7, "learning_rate": 1.0, "gradient_accumulation_steps": 4},
        {"dataset_num_proc": 1, "eval_packing": None},
    ):
        again, made = prepared(**keys)
        assert made == 1 and again.data_sha256 == first.data_sha256 and again.audit.tokens == first.audit.tokens
    large = prepared(per_device_train_batch_size=64)[0].audit
    assert large.padding_share > first.audit.padding_share > 0
    assert str(prepared(per_device_train_batch_size=2)[0].audit) == str(first.audit)
    other, made = prepared(max_length=60)
    assert made == 2 and other.data_sha256 != first.data_sha256
    assert prepared(shuffle_dataset=True, seed=1)[1] == 3 and prepared(shuffle_dataset=True, seed=2)[1] == 4


def test_so_many_workers_as_there_are_cores_and_rows_for():
    class Cores(Host):
        def cores(self):
            return 6

    least = splits.ROWS_OF_A_WORKER
    assert [splits.workers(rows, None, Cores()) for rows in (10, least, 2 * least, 5 * least, 99 * least)] == [
        *(None, None, 2, 5, 6)
    ]
    assert splits.workers(10, 3, Cores()) == 3


@pytest.mark.parametrize("keys", [{}, {"packing": True}])
def test_two_workers_make_the_rows_that_one_makes(tokenizer, tmp_path, monkeypatch, keys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    rows = [{"prompt": f"Say {n}.\n", "completion": "The fish hums. " * (1 + n % 5)} for n in range(1100)]
    found = []
    for number in (None, 2):
        training_args = arguments(tmp_path, dataset_num_proc=number, **keys)
        given = Dataset.from_list(rows)  # in memory: nothing is taken from a cache
        tokenised = splits.tokenise(given, tokenizer, training_args)
        found.append(splits.finish(tokenised, tokenizer, training_args, training_args.packing))
    assert found[0].to_dict() == found[1].to_dict() and data_sha256(found[0]) == data_sha256(found[1])


def test_workers_leave_the_environment_as_it_was(monkeypatch):
    """The first half fails when datasets no longer needs it."""
    before = os.environ
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    kept = environment_kept()
    with kept:
        Dataset.from_dict({"a": [1, 2]}).map(lambda row: row, num_proc=2)
        assert os.environ is not before and before["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ is before and "TOKENIZERS_PARALLELISM" not in os.environ


WORKER = """
import os, time
from zero_recipes.core.process import forks_end_with_parent
with forks_end_with_parent():
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
time.sleep(600)
"""


def test_forked_workers_end_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=30)
