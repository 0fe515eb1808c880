"""Rows train as they are written: every text with its loss, whatever form a row has and wherever it has nulls.

The reference renders the template by itself, and masks by the characters of each turn.
"""

import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.bad_data import BASE, arguments, found_in, lines, parquet, prepared, written
from tests.helpers.drawn_rows import (
    END,
    TEMPLATE,
    Example,
    alpaca,
    conversations,
    pairs,
    prompts_and_completions,
    texts,
)
from zero_recipes.data.as_written import compared_as_written
from zero_recipes.data.audit import RowKeys
from zero_recipes.data.forms import RowError, turns_of
from zero_recipes.data.masks import tokenise
from zero_recipes.data.prepare import prepare_split
from zero_recipes.data.samples import choose_samples, with_tokens


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# the reference


def reference(example: Example, tokenizer, assistant_only: bool) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of a row."""
    if example.texts is not None:
        prompt, completion = example.texts
        return after_prompt(prompt, f"{prompt}{completion}{END}", tokenizer)
    text = "<tool>look_up</tool>" if example.tools else ""
    with_loss, silent = [], []
    for turn in example.turns:
        begin = len(text)
        header = f"<{turn.role}>\n"
        text += f"{header}{turn.text}{END}\n"
        spoken = begin + len(header) if turn.role == "assistant" else begin
        if turn.weight == 0:
            silent.append((spoken, len(text)))
        elif turn.role == "assistant":
            with_loss.append((spoken, len(text)))
    if example.is_pair and not assistant_only:
        return after_prompt(text[: with_loss[-1][0]], text, tokenizer)
    if not assistant_only:
        with_loss = [(0, len(text))]
    tokens = tokenizer(text, return_offsets_mapping=True)
    labels = []
    for token, place in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
        has_loss = touches(place, with_loss) and not touches(place, silent)
        labels.append(token if has_loss else -100)
    return tokens["input_ids"], labels


def touches(place: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    first, last = place
    return any(first < stop and start < last for start, stop in spans)


def after_prompt(prompt: str, whole: str, tokenizer) -> tuple[list[int], list[int]]:
    """A loss on what follows the tokens that the prompt alone has too."""
    ids = tokenizer(whole)["input_ids"]
    asked = tokenizer(prompt)["input_ids"]
    same = 0
    while same < len(asked) and asked[same] == ids[same]:
        same += 1
    return ids, [-100] * same + ids[same:]


@pytest.mark.parametrize("examples", [15, pytest.param(1000, marks=pytest.mark.grid)])
def test_rows_of_every_form_train_as_they_are_written(tokenizer, examples):
    @settings(max_examples=examples, phases=[Phase.generate])  # shrinking takes minutes
    @given(st.data())
    def holds(data):
        found = data.draw(conversations() | pairs() | alpaca() | prompts_and_completions() | texts())
        is_chat = found[0].turns is not None
        assistant_only = is_chat and data.draw(st.booleans())
        streams = data.draw(st.booleans())
        rows = [example.row for example in found]
        has_parts = "'type': 'text'" in str(rows)
        has_booleans = "'weight': True" in str(rows)  # beside numbers, which a Parquet column cannot hold
        kinds = ["jsonl"] if has_parts or has_booleans else ["jsonl", "parquet"]
        kind = data.draw(st.sampled_from(kinds))
        content = lines(rows) if kind == "jsonl" else parquet(rows)
        keys = {"assistant_only_loss": assistant_only, "max_length": None, "dataset_format": None} | found[0].keys
        if streams:
            keys |= {"dataset_streaming": True, "max_steps": 1}
        with tempfile.TemporaryDirectory() as folder:
            made = prepared(written(Path(folder), {f"train.{kind}": content}), TEMPLATE, **keys)
            trained = list(made.train)
        kept = [example for example in found if not example.left_out]
        for row, example in zip(trained, kept, strict=True):
            ids, labels = reference(example, tokenizer, assistant_only)
            assert tokenizer.decode(row["input_ids"]) == tokenizer.decode(ids), example
            assert shown(row["labels"], tokenizer) == shown(labels, tokenizer), example
            assert (row["input_ids"], row["labels"]) == (ids, labels), example
        assert not {"ZR527", "ZR528", "ZR530"} & {finding.code for finding in made.findings}, made.findings
        for unused in {"lang", "score", "id"} & rows[0].keys():
            assert f"not used: {unused}" in made.shown[0][0]

    holds()


def shown(labels: list[int], tokenizer) -> str:
    """What has a loss; a bar stands for each token that has none."""
    return "".join("|" if label == -100 else tokenizer.decode([label]) for label in labels)


# what is refused, and what is said


def chat(*turns: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(turns)} | columns


ASK = {"role": "user", "content": "Where?"}
REPLY = {"role": "assistant", "content": "Here."}
IMAGE = {"type": "image_url", "image_url": {"url": "a"}}
SOUND = [chat(ASK, REPLY)] * 3
LAST = "row 3 of train: "


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (chat(ASK, REPLY | {"weight": 0.5}), "`weight` of message 1 of messages is 0.5, not 0 or 1"),
        (chat(ASK, REPLY | {"weight": "0"}), "`weight` of message 1 of messages is '0'"),
        (chat(ASK, REPLY | {"loss_mask": 0}), "message 1 of messages has `loss_mask`"),
        (chat(ASK, REPLY | {"train": True, "weight": 0}), "weight and train, which contradict each other"),
        (chat(ASK, REPLY, loss=0.3), "`loss` of the row is 0.3"),
        (chat(ASK, REPLY, loss_mask=[0, 1]), "the row has `loss_mask`"),
        (chat({"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, REPLY), "the type 'image_url'"),
        (chat(ASK, {"role": "critic", "content": "Bad."}), "message 1 of messages has the unknown role 'critic'"),
        (chat({"role": "system", "content": "Be kind."}, REPLY, system="Be rude."), "a system turn in messages"),
        (chat(ASK, REPLY, system=5), "system is 5, not text"),
        (chat(ASK, {"role": "assistant", "content": 5}), "the content of message 1 of messages is 5, not text"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_row_that_says_what_is_not_trained_is_refused(tmp_path, row, words, streams):
    """Though all rows before it are sound."""
    rows = [*(each | ({"system": "Be kind."} if "system" in row else {}) for each in SOUND), row]
    keys = {"dataset_streaming": True, "max_steps": 1} if streams else {}
    found = found_in(written(tmp_path, {"train.jsonl": lines(rows)}), template=TEMPLATE, **keys)
    assert [finding.code for finding in found] == ["ZR524"], found
    assert found[0].what.startswith(LAST) and words in found[0].what, found[0].what


@pytest.mark.parametrize("name", ["loss_mask", "loss_weight", "loss_scale", "mask", "masked"])
def test_a_weight_in_other_projects_words_is_never_passed_over(name):
    """Of a turn and of a part of its content: all would train that was not to be trained."""
    part = {"type": "text", "text": "Here."}
    for reply in (REPLY | {name: 0}, REPLY | {"content": [part, part | {name: 0}]}):
        with pytest.raises(RowError, match=f"has `{name}`, which zero-recipes does not read"):
            turns_of(chat(ASK, reply), "messages")


@pytest.mark.parametrize("name", ["id", "index", "cache_control", "annotations", "citations", "logprobs"])
def test_what_apis_note_beside_a_part_is_no_weight(name):
    part = {"type": "text", "text": "Here."}
    _, reply = turns_of(chat(ASK, REPLY | {"content": [part | {name: {"type": "ephemeral"}}]}), "messages")
    assert reply == REPLY


@pytest.mark.parametrize("name", ["loss", "train", "trainable", "training"])
def test_other_projects_names_of_a_turns_weight_count(tmp_path, name):
    rows = [chat(ASK, REPLY | {"content": "Wrong.", name: False}, ASK, REPLY | {name: True})] * 2
    data = prepared(written(tmp_path, {"train.jsonl": lines(rows)}), TEMPLATE, assistant_only_loss=True)
    assert [text for text, has_loss in data.shown[1][0][1] if has_loss] == [f"Here.{END}\n"]


def test_a_csv_file_holds_texts(tmp_path):
    content = b"question,answer\nZip?,02101\nDay?,2020-01-01\nCountry?,NA\nSure?,true\n"
    data = prepared(written(tmp_path, {"train.csv": content}), TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    answers = []
    for row in data.train:
        answers.append(tokenizer.decode([label for label in row["labels"] if label != -100]))
    assert answers == [f"{answer}{END}\n" for answer in ("02101", "2020-01-01", "NA", "true")]


@pytest.mark.parametrize("name, separator", [("train.csv", ";"), ("train.tsv", "\t")])
def test_csv_files_have_the_separator_of_their_header(tmp_path, name, separator):
    content = f"question{separator}answer\nOne, two?{separator}Three.\n".encode()
    if name.endswith("tsv"):  # a single file: `load_dataset` knows a folder's by their names
        file = tmp_path / name
        file.write_bytes(content)
    else:
        file = written(tmp_path, {name: content})
    ((_, parts),) = prepared(file, TEMPLATE, output_dir=str(tmp_path / "out")).shown[1][:1]
    text = "".join(text for text, _ in parts)
    assert "One, two?" in text and "Three." in text


def test_numbers_that_may_have_been_texts_are_refused_by_their_column(tmp_path):
    (found,) = found_in(written(tmp_path, {"train.jsonl": lines([{"question": "Zip?", "answer": 2101}] * 3)}))
    assert found.code == "ZR508" and "answer (int64)" in found.what


@pytest.mark.private
def test_texts_beside_values_of_other_types_still_become_numbers(tmp_path):
    """Fails when the datasets library keeps them: then faults/json_texts.py may go."""
    from datasets.packaged_modules.json import json as reader

    faulty = getattr(reader.json_encode_field, "unpatched", reader.json_encode_field)
    assert faulty("0210", []) == "0210" and faulty("a", []) == '"a"'


def with_markers(tokenizer, begin: bool, end: bool) -> PreTrainedTokenizerBase:
    """The tokenizer with a token for the beginning of a text, which adds markers by itself."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    single = f"{'<s> ' if begin else ''}$A{' ' + END if end else ''}"
    tokens = [("<s>", tokenizer.bos_token_id), (END, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize(
    "row", [{"text": f"<s>A fish hums.{END}"}, {"prompt": "<s>A fish", "completion": f" hums.{END}"}]
)
def test_a_marker_that_the_tokenizer_adds_stands_once(tokenizer, tmp_path, row, end):
    tokenizer = with_markers(tokenizer, True, end)
    bare = {name: text.replace("<s>", "").replace(END, "") for name, text in row.items()}
    args = arguments(tmp_path, max_length=None)
    split, findings = prepare_split(Dataset.from_list([row, bare]), tokenizer, args, packing=False)
    marked, plain = split.ready
    assert (marked["input_ids"], marked["labels"]) == (plain["input_ids"], plain["labels"])
    assert tokenizer.decode(plain["input_ids"]) == f"<s>A fish hums.{END}"
    said = [finding.what for finding in findings if finding.code == "ZR530"]
    assert len(said) == 1 and said[0].startswith(f"{2 if end else 1} of 2 rows"), findings
    if "prompt" in row:
        (sample,) = choose_samples(1, Dataset.from_list([row]), None, tokenizer)
        assert sample.prompt == "A fish"
        (asked,) = with_tokens([sample], tokenizer, args)
        assert list(asked.ids) == plain["input_ids"]


def test_an_answer_that_ends_with_the_templates_own_token_ends_once(tokenizer, tmp_path):
    tokenizer = with_markers(tokenizer, True, False)
    rows = Dataset.from_list([chat(ASK, REPLY | {"content": f"Here.{END}"}, ASK, REPLY)])
    ids = tokenise(rows, tokenizer, arguments(tmp_path, max_length=None))[0]["input_ids"]
    assert tokenizer.decode(ids).count(END) == 4


def found_as_written(tokenizer, rows: list[dict], folder: Path, **keys: Any):
    data = Dataset.from_list(rows)
    args = arguments(folder, max_length=None, **keys)
    ours = RowKeys("template" if "{% generation %}" in tokenizer.chat_template else None)
    tokenised = tokenise(data, tokenizer, args, ours)
    return compared_as_written(data, tokenised, tokenizer, args, "train")[0]


GENERATION = "{% if m['role'] == 'ROLE' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}"
GENERATION += "{{ m['content'] }}{% endif %}"
THREE = [chat({"role": "system", "content": "Be kind."}, ASK, REPLY, ASK, REPLY | {"content": "There."})] * 3


@pytest.mark.parametrize(
    ("template", "code", "level", "words"),
    [
        (TEMPLATE, None, None, ""),
        (TEMPLATE.replace("{{ m['content'] }}", GENERATION.replace("ROLE", "assistant")), None, None, ""),
        (TEMPLATE.replace("{{ m['content'] }}", GENERATION.replace("ROLE", "user")), "ZR527", "error",
         "message 1 (user) has a loss"),
        (TEMPLATE.replace("{{ m['content'] }}", GENERATION.replace("m['role'] == 'ROLE'", "loop.last")), "ZR527",
         "error", "message 2 (assistant) has no loss"),
        (TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"), "ZR528",
         "warning", "message 0 (system): Be kind."),
        (TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] != 'assistant' }}"),
         "ZR528", "error", "message 2 (assistant): Here."),
    ],
)  # fmt: skip
def test_what_the_tokens_do_not_show_is_found(tokenizer, tmp_path, template, code, level, words):
    tokenizer.chat_template = template
    found = found_as_written(tokenizer, THREE, tmp_path, assistant_only_loss=True)
    assert [(finding.code, finding.level) for finding in found] == ([] if code is None else [(code, level)]), found
    assert all(words in finding.what for finding in found), found


@pytest.mark.parametrize(("keys", "proposes"), [({"assistant_only_loss": True}, True), ({}, False)])
def test_another_mask_is_proposed_where_it_would_change_something(tokenizer, tmp_path, keys, proposes):
    wrong = TEMPLATE.replace("{{ m['content'] }}", GENERATION.replace("ROLE", "user"))
    tokenizer.chat_template = wrong
    rows = [chat(ASK, REPLY | {"weight": 0}, ASK, REPLY | {"content": "There."})]
    data = Dataset.from_list(rows, on_mixed_types="use_json")
    args = arguments(tmp_path, max_length=None, **keys)
    tokenised = tokenise(data, tokenizer, args, RowKeys("template"))
    broken = tokenised.map(lambda row: {"labels": row["input_ids"]})  # a loss on all tokens
    (found,) = compared_as_written(data, broken, tokenizer, args, "train", RowKeys("template"))[0]
    assert found.code == "ZR527" and ("assistant_mask: turn" in found.fix) == proposes
    for mask in ("turn", None):
        tokenizer.chat_template = TEMPLATE  # without markers: masked by turns whether the recipe says so or not
        (found,) = compared_as_written(data, broken, tokenizer, args, "train", RowKeys(mask))[0]
        assert found.code == "ZR527" and "assistant_mask" not in found.fix
