"""Rows of any form train as the same turns; training and generation see one prompt; what the audit counts."""

import contextlib
import io
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import trl
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, CHATML, CHATS, arguments, lines, parquet, prepared, written
from tests.helpers.faults import Side
from tests.helpers.tiny import settings_with
from tests.helpers.tools import refusal_of
from zero_recipes.core.findings import Refusal
from zero_recipes.data import forms, load
from zero_recipes.data.audit import Audit, RowKeys, audit, audit_findings, holding, overlap_findings
from zero_recipes.data.forms import alpaca_prompt, alpaca_row
from zero_recipes.data.load import load_rows, load_tokenizer
from zero_recipes.data.masks import mask_by, tokenise, with_single_markers
from zero_recipes.data.prepare import finish, prepare_split
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, with_tokens
from zero_recipes.metrics.read_runs import question, read_samples
from zero_recipes.metrics.scores import OWN
from zero_recipes.tools import main as cli
from zero_recipes.training.answers import Answers, sample_rows, show_samples, write_rows

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


def test_training_and_generation_see_the_same_prompt_to_the_byte(tokenizer):
    assert alpaca_prompt("Translate.") == alpaca_prompt("Translate.", "") == WITHOUT_INPUT
    data = Dataset.from_list([ROW])
    rows = forms.convert(data, forms.recognise(forms.column_kinds(data), settings_with(), "alpaca"))
    (sample,) = choose_samples(1, rows, "alpaca", tokenizer)
    assert rows[0] == alpaca_row(ROW) == {"prompt": WITH_INPUT, "completion": "dog"}
    assert (sample.prompt, sample.reference, question(sample.prompt)) == (WITH_INPUT, "dog", "Translate.\nHund")
    (listed,) = choose_samples(["Translate."], None, "alpaca", tokenizer)
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


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ("", None),
        ("eos_token: epoch", "ZR503"),
        ("eos_token: <|padding|>\npad_token: The", None),
        ("pad_token: <|nowhere|>", "ZR503"),
        ("pad_token: <|endoftext|>", "ZR502"),
        ("eos_token: The\npad_token: The", "ZR502"),
    ],
)
def test_check_refuses_what_the_tokenizer_decides_without_a_look_at_the_rows(tmp_path, monkeypatch, capsys, keys, code):
    Side(recipe=keys).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml"]) == (2 if code else 0)
    said = capsys.readouterr().out
    assert said.count(f"[{code}]") == bool(code) and said.count("refused") == bool(code)


def test_check_says_that_it_did_not_look_at_a_tokenizer_that_is_not_at_hand(tmp_path):
    elsewhere = settings_with(model_name_or_path="nobody/has-this", eos_token="epoch")
    assert [finding.code for finding in load.tokenizer_findings(elsewhere, asks_hub=False)] == ["ZR755"]
    here = settings_with(model_name_or_path=str(tmp_path))  # a folder without one: the run has nowhere to take it from
    assert refusal_of(lambda: list(load.tokenizer_findings(here, asks_hub=False))).codes == ["ZR199"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_is_taken_by_its_path(tmp_path, kind):
    file, rows = str(tmp_path / f"mine.{kind}"), Dataset.from_list([{"text": "a"}, {"text": "b"}])
    getattr(rows, f"to_{kind.removesuffix('l')}")(file)
    entries = [{"path": file, "split": "train[:1]"}, {"path": file}]
    for named, wanted in ({"dataset_name": file}, ["a", "b"]), ({"datasets": entries}, ["a", "a", "b"]):
        assert load_rows(settings_with(**named))[0]["text"][:] == wanted


@pytest.mark.parametrize("streams", [False, True])
def test_what_save_to_disk_has_written_is_taken_by_its_folder(tmp_path, streams):
    """All splits or a single one, as the data of a recipe and as an entry of a mixture."""
    splits = {name: Dataset.from_list([{"text": f"{name} {i}"} for i in range(3)]) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "both")
    splits["test"].save_to_disk(tmp_path / "one")
    both = settings_with(dataset_name=str(tmp_path / "both"), eval_strategy="steps", dataset_streaming=streams)
    load.refuse_data_at_hand(both, asks_hub=False)
    train, evaluation, _ = load_rows(both)
    assert [row["text"] for row in train] == ["train 0", "train 1", "train 2"]
    assert next(iter(evaluation))["text"] == "test 0"
    entries = [{"path": str(tmp_path / "one")}, {"path": str(tmp_path / "both"), "split": "test"}]
    if not streams:
        entries[1]["split"] = "test[1:]"
    mixed, _, _ = load_rows(settings_with(datasets=entries, streaming=streams))
    assert [row["text"] for row in mixed][-2:] == ["test 1", "test 2"] and len(list(mixed)) == 5 + streams
    nowhere = settings_with(dataset_name=str(tmp_path / "one"), dataset_train_split="validation")
    assert refusal_of(load_rows, nowhere).codes == ["ZR507"]


def test_a_text_file_has_a_row_in_each_line_and_says_so(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("The fish hums.\nThe bird barks.\n")
    rows, _, (form,) = load_rows(settings_with(dataset_name=str(file)))
    assert rows["text"][:] == ["The fish hums.", "The bird barks."]
    assert form.description == "text, as it is; each line of a .txt file is a row of its own"


@pytest.mark.parametrize(
    ("split", "taken"),
    [
        ("train", [0, 1, 2, 3]),
        ("train[:2]", [0, 1]),
        ("train[-1:]", [3]),
        ("train[:50%]+test", [0, 1, 4, 5]),
        ("train[:2", "ZR507"),
        ("train[:1.5]", "ZR507"),
        ("nowhere[:2]", "ZR507"),
    ],
)
def test_a_part_of_a_split_is_taken_as_load_dataset_takes_it(tmp_path, split, taken):
    for name, numbers in (("train", range(4)), ("test", range(4, 6))):
        lines = [json.dumps({"text": str(number)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    named = settings_with(dataset_name=str(tmp_path), dataset_train_split=split, eval_strategy="steps")
    named = named.replace(dataset_test_split="test[:1]")
    if taken == "ZR507":
        assert refusal_of(load_rows, named).codes == [taken]
        return
    load.refuse_data_at_hand(named, asks_hub=False)
    train, evaluation, _ = load_rows(named)
    assert list(map(int, train["text"])) == taken and evaluation["text"][:] == ["4"]
    if "[" in split:
        assert refusal_of(load_rows, named.replace(dataset_streaming=True)).codes == ["ZR507"], "a stream has no parts"


def test_samples_come_from_the_test_split_though_nothing_is_evaluated(tmp_path, tokenizer):
    rows = {split: {"instruction": f"Say {split}.", "input": "", "output": split} for split in ("train", "test")}
    (tmp_path / "train.jsonl").write_text(json.dumps(rows["train"]) + "\n")
    loaded = settings_with(dataset_name=str(tmp_path), dataset_format="alpaca")
    assert rows_to_ask(1, None, loaded) is None, "there is no such split"
    with pytest.raises(Refusal, match=r"'test'.*ZR516"):
        choose_samples(1, rows_to_ask(1, None, loaded), "alpaca", None, "test")
    (tmp_path / "test.jsonl").write_text(json.dumps(rows["test"]) + "\n")
    (sample,) = choose_samples("1", rows_to_ask("1", None, loaded), "alpaca", tokenizer, "test")
    assert sample.prompt == alpaca_row(rows["test"])["prompt"] and sample.source == "the split 'test'"
    evaluation = Dataset.from_list([{"prompt": "a", "completion": "b"}])
    assert rows_to_ask(1, evaluation, loaded) is evaluation
    assert not any(rows_to_ask(requested, None, loaded) for requested in (None, ["a"], "x"))
    (tmp_path / "test.jsonl").write_text('{"question": "a"}\n')
    assert "ZR50" in str(refusal_of(rows_to_ask, 1, None, loaded))


@pytest.mark.parametrize(
    ("requested", "code", "words"),
    [
        (b'{"prompt": "a"', "ZR199", "Expecting"),
        ("nowhere.jsonl", "ZR589", "nowhere.jsonl"),
        (["a", None], "ZR199", "row 1"),
        (b'{"prompt": "a", "completion": 1.5}\n{"prompt": {"a": 1}}', "ZR199", "row 1"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "ZR199", "chat_template"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(tmp_path, tokenizer, requested, code, words):
    path = tmp_path / "prompts.jsonl"
    if isinstance(requested, bytes):
        path.write_bytes(requested)
        requested = str(path)
    refusal = refusal_of(choose_samples, requested, None, None, tokenizer)
    assert refusal.codes == [code] and words in str(refusal)
    assert choose_samples(None, None, None, None) == choose_samples("0", None, None, None) == []


WORDS = ["Once", "upon", " a", "time,", "\n", " ", "", "x1", "Ünï", "語", "</s>", "  "]
TEXT = st.lists(st.sampled_from(WORDS), max_size=9).map("".join)


@settings(max_examples=8)
@given(
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
    st.sampled_from([None, 1, 4, 9, 30]),
    st.sampled_from(["keep_start", "keep_end"]),
)
def test_a_samples_tokens_are_those_of_a_training_row(tmp_path, tokenizer, texts, max_length, mode):
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


TURNS = [("Say 1.", "Word 1."), ("Name a fish.", "The red fish hums."), ("Why?", "It is red.")]


def as_messages(count):
    turns = [turn for pair in TURNS[:count] for turn in zip(("user", "assistant"), pair, strict=True)]
    return [{"role": role, "content": text} for role, text in turns]


def from_value(names, speaker="from", text="value"):
    return [{speaker: names[turn["role"]], text: turn["content"]} for turn in as_messages(3)]


GPT, BOT = {"user": "human", "assistant": "gpt"}, {"user": "prompter", "assistant": "bot"}
MANY = [
    {"messages": as_messages(3)},
    {"conversations": from_value(GPT)},
    {"dialogue": from_value(BOT, "speaker", "text"), "id": "7"},
    {"messages": from_value(GPT, "role", "content")},
    {"instruction": TURNS[2][0], "input": "", "output": TURNS[2][1], "history": [list(pair) for pair in TURNS[:2]]},
]
ONE = [
    {"question": TURNS[0][0], "answer": TURNS[0][1], "level": 3},
    {"instruction": "Say 1.", "input": None, "output": "Word 1."},
    {"query": "Say 1.", "response": "Word 1."},
    {"conversation": [{"role": "human", "value": "Say 1."}, {"role": "model", "value": "Word 1."}]},
]


@pytest.mark.parametrize(("rows", "count"), [(MANY, 3), (ONE, 1)])
def test_every_form_of_the_same_turns_trains_as_the_same_tokens(tmp_path, rows, count):
    found = []
    for number, row in enumerate(rows):
        (tmp_path / str(number)).mkdir()
        file = {"train.parquet": parquet([row] * 3)} if number % 2 else {"train.jsonl": lines([row] * 3)}
        data = prepared(written(tmp_path / str(number), file), assistant_only_loss=True)
        found.append((data.train["input_ids"][:], data.train["labels"][:]))
        said = data.shown[0][0]
        assert all(name in said for name, value in row.items() if value is not None), said
        answers = [text for text, carries in data.shown[1][0][1] if carries]
        assert answers == [f"{answer}<|endoftext|>" for _, answer in TURNS[:count]]
    assert all(each == found[0] for each in found)


def test_a_pair_without_assistant_only_loss_trains_its_answer_alone(tmp_path):
    columns = {"question": "ask", "answer": "reply"}
    folder = written(tmp_path, {"train.csv": b"ask,reply\nSay 1.,Word 1.\n"})
    data = prepared(folder, columns=columns)
    assert [text for text, carries in data.shown[1][0][1] if carries] == ["Word 1.<|endoftext|>"]
    assert refusal_of(prepared, folder, template=None, columns=columns).codes == ["ZR890"]


@pytest.mark.parametrize(
    "row", [{"question": "a", "answer": "b", "output": "c"}, {"answer": "b"}, {"question": "a", "answer": ["b"]}]
)
def test_what_could_be_two_things_is_not_guessed(row):
    kinds = forms.column_kinds(Dataset.from_list([row]))
    assert forms.recognise(kinds, settings_with(dataset_format=None), None) is None


def test_a_mixture_is_drawn_by_its_weights_whatever_forms_its_entries_have(tmp_path):
    chats = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 300
    files = {"chats.jsonl": lines(chats), "pairs.jsonl": lines([{"ask": "c", "reply": "d"}] * 100)}
    folder = written(tmp_path, files)
    entries = [{"path": "json", "data_files": str(folder / name)} for name in files]
    more = {"columns": {"question": "ask", "answer": "reply"}}
    keys = {"assistant_only_loss": True, "dataset_format": None, "seed": 3}
    mixed = [entries[0] | {"weight": 3}, entries[1] | {"weight": 1} | more]
    rows = load.load_rows(settings_with(datasets=mixed, **keys))[0]
    share = sum(row["messages"][0]["content"] == "c" for row in rows) / len(rows)
    assert 0.15 < share < 0.35 and len(rows) <= 410
    whole = load.load_rows(settings_with(datasets=mixed, mixture_stopping_strategy="all_exhausted", **keys))[0]
    assert len(whole) >= len(rows)
    added, _, recognised = load.load_rows(settings_with(datasets=[entries[0], entries[1] | more], **keys))
    assert len(added) == 400 and len(recognised) == 2
    with pytest.raises(Refusal, match="must be set for all entries"):
        load.load_rows(settings_with(datasets=[mixed[0], entries[1] | more], **keys))


def test_fractions_are_shares_of_the_mixture_or_are_refused(tmp_path):
    """As TRL's documentation has them: no entry is repeated, and the first rows of each are taken."""
    files = {"a.jsonl": lines([{"text": "a"}] * 100), "b.jsonl": lines([{"text": "b"}] * 10)}
    folder = written(tmp_path, files)
    first, second = [{"path": "json", "data_files": str(folder / name)} for name in files]
    mixture = [first | {"fraction": 3}, second | {"fraction": 1}]
    rows, _, found = load.load_rows(settings_with(datasets=mixture))
    assert [row["text"] for row in rows] == ["a"] * 30 + ["b"] * 10
    assert found[0].description.endswith("the first 30 of 100 rows (fraction)")

    beside = [first | {"fraction": 0.5, "weight": 1}, second | {"fraction": 0.5, "weight": 1}]
    single = [first | {"fraction": 0.25}]
    for datasets, code in ((beside, "ZR581"), ([first | {"weight": 1}, second | {"fraction": 1}], "ZR581"),
                           (single, "ZR582")):  # fmt: skip
        settings = settings_with(datasets=datasets)
        assert refusal_of(load.load_rows, settings).codes == [code]
        assert refusal_of(load.refuse_data_at_hand, settings, asks_hub=False).codes == [code]
    for fraction, part in ((0.25, "train[:25%]"), (0.001, "train[:1%]")):  # no part without rows
        settings = settings_with(datasets=[first | {"fraction": fraction}])
        assert f"split: {part}" in refusal_of(load.load_rows, settings).fix
    fixed = load.load_rows(settings_with(datasets=[first | {"split": "train[:25%]"}]))[0]
    whole = load.load_rows(settings_with(datasets=[first | {"fraction": 1.0}]))[0]
    assert (len(fixed), len(whole)) == (25, 100)


@pytest.mark.parametrize(
    ("ids", "losses", "kept", "kept_losses"),
    [
        ([5, 6, 0, 0], [0, 1, 0, 1], [5, 6, 0], [0, 1, 1]),  # the template's end without a loss, and TRL's with one
        ([5, 6, 0, 0], [0, 1, 1, 0], [5, 6, 0], [0, 1, 1]),
        ([5, 6, 0, 0, 0], [0, 1, 0, 0, 1], [5, 6, 0], [0, 1, 1]),
        ([5, 6, 0, 0], [0, 1, 0, 0], [5, 6, 0], [0, 1, 0]),
        ([5, 0, 6, 0], [1, 1, 1, 1], [5, 0, 6, 0], [1, 1, 1, 1]),
    ],
)
def test_of_an_end_that_stands_twice_one_stays_with_the_loss_of_either(ids, losses, kept, kept_losses):
    """Else a model never learns to end."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    assert tokenizer.eos_token_id == 0
    labels = [token if loss else -100 for token, loss in zip(ids, losses, strict=True)]
    rows = Dataset.from_list([{"text": "a fish"}])
    tokenised = Dataset.from_list([{"input_ids": ids, "labels": labels}])
    (row,), doubled = with_single_markers(rows, tokenised, tokenizer)
    assert (row["input_ids"], [label != -100 for label in row["labels"]]) == (
        kept,
        [bool(loss) for loss in kept_losses],
    )
    assert doubled == ([0] if len(kept) < len(ids) else [])


def test_the_test_split_follows_from_the_seed_alone(tmp_path):
    """Ranks have drawn differently by then, and each splits for itself."""
    folder = written(tmp_path, {"rows.jsonl": lines([{"text": f"fish {i}"} for i in range(200)])})
    mixture = {"datasets": [{"path": str(folder)}], "test_split_size": 0.2, "dataset_format": None}

    def test_split(seed: int, drawn_before: int) -> list[str]:
        numpy.random.seed(drawn_before)
        splits, _ = load.load_splits(settings_with(seed=seed, **mixture))
        return splits["test"]["text"][:]

    assert len(test_split(3, 0)) == 40
    assert test_split(3, 0) == test_split(3, 1) != test_split(4, 1)


# a template as its model's repository has it: the token that ends a turn, what it puts before the last answer, and what
# it writes after a turn
STOCK = {
    "llama3_1": ("<|eot_id|>", "", ""),
    "qwen3": ("<|im_end|>", "<think>\n\n</think>\n\n", "\n"),
    "gemma3": ("<end_of_turn>", "", "\n"),
}
TURN = st.lists(st.sampled_from(["fish", "Say", "red.", "The", "1", "\n", "user", "cat"]), min_size=1, max_size=6)
TURN = TURN.map(" ".join).filter(str.strip).map(str.strip)


@pytest.mark.parametrize("name", STOCK)
@settings(max_examples=4)
@given(st.lists(st.tuples(TURN, TURN), min_size=1, max_size=3))
def test_the_mask_of_a_stock_template_is_the_one_made_by_hand(tmp_path, name, turns):
    end, thoughts, after = STOCK[name]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    named = ["<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<start_of_turn>", end]
    tokenizer.add_tokens(named, special_tokens=True)
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
    pairs = [turn for pair in turns for turn in zip(("user", "assistant"), pair, strict=True)]
    rows = Dataset.from_list([{"messages": [{"role": role, "content": text} for role, text in pairs]}])
    for how, thinking, tail in (("answer", "keep", ""), ("turn", "keep", after), ("turn", "mask_empty", after)):
        args = arguments(tmp_path, assistant_only_loss=True, max_length=None)
        row = prepare_split(rows, tokenizer, args, False, RowKeys(how, thinking=thinking))[0].ready[0]
        answers = [f"{answer}{end}{tail}" for _, answer in turns]
        answers[-1] = (thoughts if (how, thinking) == ("turn", "keep") else "") + answers[-1]
        assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "".join(answers)
        whole = tokenizer.apply_chat_template(rows[0]["messages"])["input_ids"]
        assert row["input_ids"] == whole, "the text is the template's own"
    (sample,) = choose_samples(1, rows, None, tokenizer)
    asked = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    rest = tokenizer.decode(row["input_ids"][len(asked) :])
    assert row["input_ids"][: len(asked)] == asked and rest == f"{thoughts}{turns[-1][1]}{end}{after}"
    assert sample.templated and sample.reference == turns[-1][1]


def test_masks_are_made_here_only_where_trl_has_none(tmp_path):
    tokenizer, rows = AutoTokenizer.from_pretrained(BASE), Dataset.from_list([{"messages": as_messages(1)}])
    args, folder = arguments(tmp_path, assistant_only_loss=True), Path(trl.__file__).with_name("chat_templates")
    found = {}
    for name in ("llama3_1", "qwen3", "llama3_training"):
        tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
        found[name] = mask_by(rows, tokenizer, args)
    assert found == {"llama3_1": "turn", "qwen3": None, "llama3_training": None}
    tokenizer.chat_template = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    args.assistant_only_loss = False
    assert mask_by(rows, tokenizer, args) is None


EOS = 0


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
    assert f"max_length: {holding(whole[-1])} to keep every row whole (the longest has {whole[-1]}" in finding.fix
    assert holding(whole[-1]) % 64 == 0 and whole[-1] <= holding(whole[-1]) < whole[-1] + 64
    for keys in ({"max_length": holding(whole[-1])}, {"max_length": None}, {"max_length": whole[-2]},
                 {"max_length": 40, "packing": True, "packing_strategy": "bfd_split"}):  # fmt: skip
        assert "ZR553" not in audited(rows, tokenizer, tmp_path, **keys)[1], keys


OF_200 = Audit(
    rows=200, truncated=0, dropped=0, without_supervision=[], tokens=9, supervised=9, longest=99, longest_sequence=40,
    largest_id=9, unsupervised_ends=0, empty=[],
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "column", "found"),
    [
        ({"truncated": 2}, "text", []),  # one of a hundred is a slip
        ({"truncated": 3}, "text", [("ZR553", "warning")]),
        ({"rows": 20, "truncated": 1}, "text", []),  # and a single one
        ({"rows": 20, "truncated": 2}, "text", [("ZR553", "warning")]),
        ({"rows": 201, "empty": [4, 5]}, "completion", [("ZR533", "warning")]),
        ({"empty": [4, 5]}, "completion", [("ZR533", "error")]),
        ({"empty": [*range(199)]}, "text", [("ZR533", "warning")]),  # blank lines between texts are usual
        ({"empty": [*range(200)]}, "text", [("ZR533", "error")]),
    ],
)
def test_so_many_rows_cannot_be_slips(tokenizer, tmp_path, changes, column, found):
    rows = Dataset.from_list([{column: "a fish"}] * 200)
    counts = replace(OF_200, **changes)
    said = audit_findings(counts, rows, tokenizer, arguments(tmp_path, max_length=40), RowKeys(), "train", "texts")
    assert [(finding.code, finding.level) for finding in said] == found


def test_check_data_shows_the_table_and_three_rows(monkeypatch, capsys, tmp_path):
    Side().write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml", "--data"]) == 0
    shown = capsys.readouterr().out
    assert "supervised; " in shown and shown.count("The fish says") == 3


@pytest.mark.parametrize("template, fits", [(None, False), ("chatml", True), ("llama3", True)])
def test_check_knows_whether_turns_have_a_template(monkeypatch, capsys, tmp_path, template, fits):
    side = Side(recipe="dataset_name: chats.jsonl\n", files={"chats.jsonl": lines(CHATS).decode()})
    argv = side.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    named = ["--chat_template_path", template] if template else []
    assert cli.main(["check", argv[0], "--dataset_format", "null", "--eval_strategy", "no", *named]) == 2 * (not fits)
    assert ("[ZR890]" in capsys.readouterr().out) != fits


def as_dataset(rows: list[dict], kind: str = "int64") -> Dataset:
    return Dataset.from_list(rows, features=Features({"input_ids": List(Value(kind)), "labels": List(Value(kind))}))


COUNTED = [
    {"input_ids": [5], "labels": [5]},  # the first token of a row is no target
    {"input_ids": [7, 8, EOS], "labels": [-100, 8, EOS]},
    {"input_ids": [EOS, 5], "labels": [EOS, 5]},
    {"input_ids": [7, EOS, 9, EOS], "labels": [-100, EOS, 9, -100]},
    {"input_ids": [7, 8, 9, 7, 8], "labels": [-100] * 5},
]


@pytest.mark.parametrize(
    ("longest", "strategy", "truncated", "dropped", "tokens", "open_ends"),
    [(None, None, 0, 0, 15, 3), (3, None, 2, 1, 9, 1), (3, "bfd", 2, 0, 12, 1), (3, "wrapped", 2, 0, 15, 1)],
)
def test_the_audit_counts(tokenizer, tmp_path, longest, strategy, truncated, dropped, tokens, open_ends):
    """Of more than a batch, behind an index, in several chunks."""
    packing = {"packing": strategy is not None, "packing_strategy": strategy or "bfd"}
    training_args, rows = arguments(tmp_path, max_length=longest, **packing), as_dataset(COUNTED * 300, "int32")
    ready = finish(rows, tokenizer, training_args, strategy is not None)
    behind = concatenate_datasets([rows, rows]).select(range(len(rows) - 1, -1, -1))
    found = audit(behind, behind, ready, tokenizer, training_args)
    counts = (found.truncated, found.dropped, found.tokens, found.unsupervised_ends, found.supervised)
    assert counts == tuple(300 * number for number in (truncated, dropped, tokens, open_ends, 5))
    assert (found.rows, found.longest, found.without_supervision) == (1500, 5, [*range(0, 1500, 5)])


@pytest.mark.parametrize("packing", [False, True])
def test_rows_longer_than_max_length_are_left_out_where_the_recipe_says_so(tokenizer, tmp_path, packing):
    drop = RowKeys(long_rows="drop")
    training_args = arguments(tmp_path, max_length=3, packing=packing)
    ready = finish(as_dataset(COUNTED), tokenizer, training_args, packing, drop)
    rows = as_dataset(COUNTED)
    found = audit(rows, rows, ready, tokenizer, training_args, drop)
    assert (found.truncated, found.dropped, found.tokens, found.supervised) == (2, 2, 6, 3)
    codes = [finding.code for finding in audit_findings(found, rows, tokenizer, training_args, drop, "x", "")]
    assert "ZR553" not in codes, "nothing is cut"


def test_rows_that_are_in_both_splits_are_found():
    one = {"input_ids": [7], "labels": [7]}
    training = as_dataset([one] * 1100 + [{"input_ids": [7, 8], "labels": [7, 8]}], "int32")
    other = {"input_ids": [9, 7, 8], "labels": [1, 1, 1]}
    evaluation = as_dataset([other, {"input_ids": [7, 8], "labels": [-100, 8]}, other])
    (finding,) = overlap_findings(training, evaluation, "test")
    assert "1 of 3 rows of test" in finding.what and "the first is row 1" in finding.what
    assert not list(overlap_findings(training, evaluation.select([0, 2]), "test"))


# samples: whatever people and models write


HOSTILE = ["[/INST]", "[bold]x", "[link=file:///x]y[/link]", "\\[red]", "\\", ":smile:", "", "\x1b[2J\x1b]0;title\x07"]
HOSTILE += ["\r", "\x00", "\b\b\b", "\u202ereversed\u202c", "שלום", "語" * 90, "\u2028", "e\u0301" * 50, "x" * 5_000]
HOSTILE += ["\t\n\n", "👩‍👩‍👧‍👦", "\ufeff", "\x85", "�"]
ANY = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=20), max_size=4).map("".join)  # no half of a surrogate pair
LOSS = st.sampled_from([None, math.nan, math.inf, 0.5, 3.0])


@settings(max_examples=15)
@given(st.lists(st.tuples(ANY, st.none() | ANY, ANY, ANY, LOSS, LOSS), min_size=1, max_size=7))
def test_any_text_is_printed_written_and_read_again(drawn):
    prompts, references, *texts, before, after = map(list, zip(*drawn, strict=True))
    samples = [Sample(prompt, reference) for prompt, reference in zip(prompts, references, strict=True)]
    rows = sample_rows(samples, Answers(texts[0], before), Answers(texts[1], after), dict.fromkeys(OWN))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        write_rows(path, rows)
        assert read_samples(path) == rows
        for line in path.read_text().split("\n")[:-1]:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for row, reference, loss in zip(rows, references, after, strict=True):
        assert set(row.scores_after) == (set() if reference is None else {"exact_match", "token_f1", "reference_loss"})
        known = reference is not None and loss in (0.5, 3.0)
        assert row.scores_after.get("reference_loss") == (loss if known else None)
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)  # of few characters
    with contextlib.redirect_stdout(screen):
        show_samples(rows, "from [/a] file")
    printed = screen.buffer.getvalue().decode()
    assert "[/a]" in printed and "\x1b" not in printed and "\x00" not in printed
