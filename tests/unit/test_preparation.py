"""Rows are made once, before the model, and are those that SFTTrainer would have made; nobody waits for the dead."""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import psutil
import pyarrow as pa
import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer
from trl import SFTTrainer

from tests.helpers.bad_data import ALPACA, BASE, CHATML, IDS, arguments, chat, lines, prepared, written
from tests.helpers.tiny import ROOT, settings_with
from zero_recipes.config.settings import steps_by_epochs
from zero_recipes.data import forms, prepare
from zero_recipes.data.load import apply_chat_template_file
from zero_recipes.data.masks import tokenise
from zero_recipes.data.prepare import data_sha256, finish, prepare_split

WORDS = ["The fish hums. ", "The cat barks in the cave. ", "It is red. "]
PAIRS = [{"prompt": f"Say {i}.\n", "completion": WORDS[i % 3] * (1 + i % 9)} for i in range(40)]
TEXTS = [{"text": WORDS[i % 3] * (1 + i % 9)} for i in range(40)]
CHATS = [chat(i) for i in range(40)]


@pytest.mark.parametrize(
    "rows, keys",
    [
        (PAIRS, {"completion_only_loss": False, "truncation_mode": "keep_end", "max_length": 16}),
        (PAIRS, {"packing": True, "packing_strategy": "wrapped", "shuffle_dataset": True}),
        (TEXTS, {"shuffle_dataset": True}),
        (CHATS, {"assistant_only_loss": True}),
        (CHATS, {"chat_template_path": "chatml.jinja"}),
        (CHATS, {"chat_template_path": "clone"}),
        ([chat(i, "conversations", "from", "value") for i in range(9)], {}),
    ],
)
def test_rows_are_those_that_sft_trainer_makes(tmp_path, monkeypatch, rows, keys):
    monkeypatch.chdir(tmp_path)
    Path("chatml.jinja").write_text(CHATML)
    source = AutoTokenizer.from_pretrained(BASE)
    source.chat_template = CHATML
    source.add_tokens(["<assistant>"])
    source.save_pretrained("clone")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHATML
    before, data, training_args = len(tokenizer), Dataset.from_list(rows), arguments(tmp_path, **keys)

    templated = apply_chat_template_file(tokenizer, training_args)
    form = forms.recognise(forms.column_kinds(data), settings_with(dataset_format=None), None)
    converted = forms.convert(data, form)
    ours = prepare_split(converted, templated, training_args, training_args.packing)[0].ready
    assert len(tokenizer) == before, "SFTTrainer must still find the tokens that it adds"

    trainer = SFTTrainer(model=str(BASE), args=training_args, train_dataset=data, processing_class=tokenizer)
    theirs = trainer.train_dataset
    for column in {"input_ids", "labels", "seq_lengths"} & set(theirs.column_names):
        assert ours[column][:] == theirs[column][:]
    if keys.get("chat_template_path") == "clone":
        assert before in ours["input_ids"][0], "the cloned token"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Rows as `prepared` makes them, kept in a folder of their own; and how often rows were made."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    calls, real = [], prepare.prepare_splits
    monkeypatch.setattr(prepare, "prepare_splits", lambda *a: calls.append(1) or real(*a))
    return lambda data, **keys: (prepared(data, **keys), len(calls))


def test_other_rows_of_a_stream_are_known_by_their_hash(tmp_path):
    keys = {"dataset_format": "alpaca", "dataset_streaming": True, "max_steps": 1}
    changed = [*ALPACA[:3], ALPACA[3] | {"output": "Another."}, *ALPACA[4:]]
    found = []
    for number, rows in enumerate((ALPACA, ALPACA, changed)):
        (tmp_path / str(number)).mkdir()
        data = written(tmp_path / str(number), {"train.jsonl": lines(rows)})
        found.append(prepared(data, **keys).data_sha256)
    assert found[0] == found[1] != found[2]


def test_rows_are_made_again_only_for_what_makes_other_rows(made, tmp_path):
    rows = [row | {"output": row["output"] * (1 + number)} for number, row in enumerate(ALPACA)]
    data = written(tmp_path, {"train.jsonl": lines(rows)})
    keys = {"dataset_format": "alpaca", "max_length": 200}
    first, count = made(data, **keys)
    assert count == 1
    again, count = made(data, **keys, seed=7, learning_rate=1.0, dataset_num_proc=1, per_device_train_batch_size=64)
    assert count == 1 and again.data_sha256 == first.data_sha256 and again.audit == first.audit
    other, count = made(data, **keys | {"max_length": 60})
    assert count == 2 and other.data_sha256 != first.data_sha256
    assert [made(data, shuffle_dataset=True, seed=seed, **keys)[1] for seed in (1, 2, 1)] == [3, 4, 4]
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_rows_whose_assistant_alone_carries_loss_are_others(made, tmp_path):
    data = written(tmp_path, {"train.jsonl": lines(CHATS)})
    whole, assistant = (made(data, assistant_only_loss=only)[0] for only in (False, True))
    assert assistant.audit.tokens == whole.audit.tokens and assistant.audit.supervised < whole.audit.supervised
    assert made(data, assistant_only_loss=True)[1] == 2
    ignored = {"assistant_only_loss": True, "template": CHATML.replace("}}<|endoftext|>{%", "}}{%")}
    for _ in range(2):  # made, and found: the warnings of kept rows are printed too
        assert [finding.code for finding in made(data, **ignored)[0].findings] == ["ZR514"]


def test_the_hash_of_rows_is_of_values_and_boundaries_alone():
    rows = [{"input_ids": list(range(n % 9)), "labels": [n] * (n % 9)} for n in range(1, 1500)]
    rows += [{"input_ids": [4, 5, 6], "labels": [4, -100, 6]}, {"input_ids": [9], "labels": [9]}]
    whole = Dataset.from_list(rows)
    digest = data_sha256(whole)
    table = whole.data.table.cast(pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "labels")}))
    assert data_sha256(Dataset(table)) == digest, "another width"
    assert data_sha256(concatenate_datasets([whole, whole]).select(range(len(rows)))) == digest, "chunks and an index"
    assert data_sha256(whole.select_columns(["labels", "input_ids"])) == digest, "columns in another order"
    for change in (
        lambda r: r[-2].update(labels=[4, -100, -100]),
        lambda r: (r[-2].update(input_ids=[4, 5]), r[-1].update(input_ids=[6, 9])),  # a boundary
        lambda r: r.reverse(),
    ):
        other = copy.deepcopy(rows)
        change(other)
        assert data_sha256(Dataset.from_list(other)) != digest


@settings(max_examples=60)
@given(
    rows=st.integers(1, 60), micro=st.integers(1, 5), replicas=st.integers(1, 4), accumulation=st.integers(1, 4),
    drop_last=st.booleans(), epochs=st.sampled_from([0.3, 1, 2.5]),
)  # fmt: skip
def test_steps_by_epochs_are_those_that_transformers_counts(rows, micro, replicas, accumulation, drop_last, epochs):
    loader = DataLoader(range(rows), batch_size=micro, drop_last=drop_last)
    loader = prepare_data_loader(loader, num_processes=replicas, process_index=0)
    keys = {"gradient_accumulation_steps": accumulation, "num_train_epochs": epochs, "max_steps": -1}
    recipe = SimpleNamespace(per_device_train_batch_size=micro, dataloader_drop_last=drop_last, **keys)
    if len(loader) == 0:
        return  # the run is refused: there is no step
    trainer = SimpleNamespace(get_total_train_batch_size=lambda args: 1, get_sp_size=lambda: 1, num_examples=len)
    counted = Trainer.set_initial_training_values(trainer, recipe, loader)[-1]
    assert steps_by_epochs(rows, recipe, replicas) == counted


def test_two_workers_pack_the_rows_as_one_does(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = [{"prompt": f"Say {n}.\n", "completion": "The fish hums. " * (1 + n % 5)} for n in range(1100)]
    found = []
    for number in (None, 2):
        training_args = arguments(tmp_path, dataset_num_proc=number, packing=True)
        tokenised = tokenise(Dataset.from_list(rows), tokenizer, training_args)  # in memory: no cache
        found.append(finish(tokenised, tokenizer, training_args, packing=True))
    assert found[0].to_dict() == found[1].to_dict()


def test_rows_of_ids_that_are_chosen_are_planned(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    chosen = Dataset.from_list(IDS).select(range(0, len(IDS), 2))  # by an index over the rows
    found = tokenise(chosen, tokenizer, arguments(tmp_path))
    assert found["input_ids"][:] == [row["input_ids"] for row in IDS[::2]]


WORKER = """
import os, signal
from zero_recipes.core.process import forks_end_with_parent
with forks_end_with_parent():
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    signal.pause()
"""


def test_forked_workers_end_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=30)
