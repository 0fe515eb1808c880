"""One formatter for training and generation: Alpaca's prompt to the byte, the end supervised, pad is not eos."""

import json

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, arguments
from tests.helpers.tiny import settings_with
from zero_recipes.cli import main as cli
from zero_recipes.core.findings import Refusal
from zero_recipes.data import forms
from zero_recipes.data.forms import alpaca_prompt, alpaca_row
from zero_recipes.data.load import load_rows, load_tokenizer
from zero_recipes.data.prepare import finish, tokenise
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, with_tokens
from zero_recipes.training.samples import question

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nTranslate.\n\n### Input:\nHund\n\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nTranslate.\n\n### Response:\n"
)
ROW = {"instruction": "Translate.", "input": "Hund", "output": "dog"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def test_training_and_generation_see_the_same_prompt_to_the_byte():
    assert alpaca_prompt("Translate.") == alpaca_prompt("Translate.", "") == WITHOUT_INPUT
    rows = forms.convert(Dataset.from_list([ROW]), forms.recognise(ROW, settings_with(), "alpaca"))
    (sample,) = choose_samples(1, rows, "alpaca", tokenizer=None)
    assert rows[0] == alpaca_row(ROW) == {"prompt": WITH_INPUT, "completion": "dog"}
    assert (sample.prompt, sample.reference, question(sample.prompt)) == (WITH_INPUT, "dog", "Translate.\nHund")
    (listed,) = choose_samples(["Translate."], None, "alpaca", tokenizer=None)
    assert listed.prompt == WITHOUT_INPUT and listed.reference is None


@pytest.mark.parametrize(
    ("saved", "named", "taken"),
    [
        (None, None, "<|padding|>"),
        ("<|endoftext|>", None, "<|padding|>"),
        ("<|padding|>", "The", "The"),
        (None, "<|endoftext|>", "ZR502"),
        (None, "<|nowhere|>", "ZR503"),
    ],
)
def test_pad_is_not_the_end_of_text(tmp_path, tokenizer, saved, named, taken):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.pad_token = saved
    tokenizer.save_pretrained(tmp_path)
    try:
        loaded = load_tokenizer(settings_with(model_name_or_path=str(tmp_path), pad_token=named))
    except Refusal as refusal:
        assert refusal.codes == [taken]
    else:
        assert (loaded.pad_token, loaded.eos_token) == (taken, "<|endoftext|>")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_is_taken_by_its_path(tmp_path, kind):
    file, rows = str(tmp_path / f"mine.{kind}"), Dataset.from_list([{"text": "a"}, {"text": "b"}])
    getattr(rows, f"to_{kind.removesuffix('l')}")(file)
    entries = [{"path": file, "split": "train[:1]"}, {"path": file}]
    for named, wanted in ({"dataset_name": file}, ["a", "b"]), ({"datasets": entries}, ["a", "a", "b"]):
        assert load_rows(settings_with(**named)).train["text"][:] == wanted


def test_fetch_measures_what_is_here_already(monkeypatch, capsys):
    monkeypatch.chdir(BASE.parents[1])
    assert cli.main(["fetch", "recipes/tiny.yaml"]) == 0
    model, data = capsys.readouterr().out.splitlines()
    assert model.startswith("./tiny_world/base: ") and data.startswith("./tiny_world: ") and data.endswith(" MB")


def test_samples_come_from_the_test_split_though_nothing_is_evaluated(tmp_path):
    rows = {split: {"instruction": f"Say {split}.", "input": "", "output": split} for split in ("train", "test")}
    (tmp_path / "train.jsonl").write_text(json.dumps(rows["train"]) + "\n")
    loaded = settings_with(dataset_name=str(tmp_path), dataset_format="alpaca")
    assert rows_to_ask(1, None, loaded) is None, "there is no such split"
    with pytest.raises(Refusal, match=r"'test'.*ZR516"):
        choose_samples(1, rows_to_ask(1, None, loaded), "alpaca", None, "test")
    (tmp_path / "test.jsonl").write_text(json.dumps(rows["test"]) + "\n")
    (sample,) = choose_samples("1", rows_to_ask("1", None, loaded), "alpaca", None, "test")
    assert sample.prompt == alpaca_row(rows["test"])["prompt"] and sample.source == "the split 'test'"
    evaluation = Dataset.from_list([{"prompt": "a", "completion": "b"}])
    assert rows_to_ask(1, evaluation, loaded) is evaluation
    assert not any(rows_to_ask(requested, None, loaded) for requested in (None, ["a"], "x"))
    (tmp_path / "test.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(Refusal, match="ZR50"):
        rows_to_ask(1, None, loaded)


@pytest.mark.parametrize(
    ("requested", "code", "words"),
    [
        (b'{"prompt": "a"', "ZR517", "Expecting"),
        (b'{"prompt": "\xe9"}', "ZR517", "utf-8"),
        ("nowhere.jsonl", "ZR517", "nowhere.jsonl"),
        (["a", None], "ZR519", "row 1"),
        (b'{"prompt": "a", "completion": 1.5}\n{"prompt": {"a": 1}}', "ZR519", "row 1"),
        (b'{"prompt": "\\udfff"}', "ZR519", "surrogates not allowed"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "ZR519", "chat_template"),
        (b'{"question": "a"}', "ZR519", "prompt"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(tmp_path, tokenizer, requested, code, words):
    path = tmp_path / "prompts.jsonl"
    if isinstance(requested, bytes):
        path.write_bytes(requested)
        requested = str(path)
    with pytest.raises(Refusal) as caught:
        choose_samples(requested, None, None, tokenizer)
    assert caught.value.codes == [code] and words in str(caught.value)
    assert choose_samples(None, None, None, None) == choose_samples("0", None, None, None) == []


WORDS = st.lists(
    st.sampled_from(["Once", "upon", " a", "time,", "\n", " ", "", "x1", "Ünï", "語", "</s>", "  "]), max_size=9
)
TEXT = WORDS.map("".join)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
    st.sampled_from([None, 1, 4, 9, 30]),
    st.sampled_from(["keep_start", "keep_end"]),
)
def test_a_samples_tokens_are_those_of_a_training_row(tmp_path, tokenizer, texts, max_length, mode):
    """Of any rows; empty where training drops the row."""
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    training_args = arguments(tmp_path, max_length=max_length, truncation_mode=mode, shuffle_dataset=True)
    samples = choose_samples(len(rows), Dataset.from_list(rows), None, tokenizer)
    asked = with_tokens([*samples, Sample("no answer", None)], tokenizer, training_args)
    assert asked[-1].ids == () and all(sample.row is None for sample in asked)
    for sample, row in zip(asked, rows, strict=False):
        one = Dataset.from_list([row])
        ready = finish(tokenise(one, tokenizer, training_args), tokenizer, training_args, packing=False)
        trained = (tuple(ready[0]["input_ids"]), tuple(ready[0]["labels"])) if len(ready) else ((), ())
        assert (sample.ids, sample.labels) == trained
