"""Rows of several forms in one data set, or in one mixture, become one form, and train what each trains alone."""

from itertools import combinations
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, CHATML, arguments, lines, written
from tests.helpers.tiny import settings_with
from tests.helpers.tools import refusal_of
from zero_recipes.data import load
from zero_recipes.data.audit import RowKeys
from zero_recipes.data.masks import tokenise
from zero_recipes.data.prepare import prepare_split

MESSAGES = {"messages": [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "One."}]}
PAIR = {"question": "Say 2.", "answer": "Two."}
TURNS = {name: [{"role": role, "content": text}] for name, role, text in (
    ("prompt", "user", "Say 3."), ("completion", "assistant", "Three."))}  # fmt: skip
TEXTS = {"prompt": "Say 4.", "completion": "Four."}
FORMS = {"messages": MESSAGES, "pair": PAIR, "turns": TURNS, "texts": TEXTS}
AS_TURNS = {"texts": {"question": "Say 4.", "answer": "Four."}}  # what they train as beside conversations


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHATML
    return tokenizer


def rows_of(folder: Path, rows: list[dict], **keys):
    """What `load_rows` makes of a mixture with an entry of three rows for each of these rows."""
    entries = []
    for number, row in enumerate(rows):
        (folder / f"{number}.jsonl").write_bytes(lines([row] * 3))
        entries.append({"path": str(folder / f"{number}.jsonl")})
    return load.load_rows(settings_with(**{"datasets": entries, "dataset_format": None} | keys))[0]


def trained(folder: Path, rows, tokenizer, **keys) -> list[tuple[str, str]]:
    """(the whole row, what of it has a loss) of each row."""
    found = []
    for row in tokenise(rows, tokenizer, arguments(folder, **keys)):
        supervised = [token for token in row["labels"] if token != -100]
        found.append((tokenizer.decode(row["input_ids"]), tokenizer.decode(supervised)))
    return found


@pytest.mark.parametrize("assistant_only_loss", [False, True])
@pytest.mark.parametrize("names", combinations(FORMS, 2), ids="+".join)
def test_entries_of_two_forms_train_what_each_trains_alone(tmp_path, tokenizer, names, assistant_only_loss):
    keys = {"assistant_only_loss": assistant_only_loss}
    mixed = trained(tmp_path, rows_of(tmp_path, [FORMS[name] for name in names], **keys), tokenizer, **keys)
    alone = []
    for name in names:
        rows = rows_of(tmp_path, [AS_TURNS.get(name, FORMS[name])], **keys)
        alone += trained(tmp_path, rows, tokenizer, **keys)
    assert mixed == alone


def test_a_completion_alone_has_a_loss_beside_a_conversation_that_has_one_as_a_whole(tmp_path, tokenizer):
    mixed = rows_of(tmp_path, [MESSAGES, TEXTS])
    (whole, first), (_, second) = trained(tmp_path, mixed, tokenizer)[::3]
    assert first == whole
    assert second == "Four.<|endoftext|>"
    (_, whole_row) = trained(tmp_path, mixed, tokenizer, completion_only_loss=False)[-1]
    assert "Say 4." in whole_row
    _, findings = prepare_split(mixed, tokenizer, arguments(tmp_path), False, RowKeys())
    assert not [found.code for found in findings if found.level == "error"]


def test_texts_become_completions_beside_prompts(tmp_path, tokenizer):
    tokens = trained(tmp_path, rows_of(tmp_path, [{"text": "The fish hums."}, TEXTS]), tokenizer)
    text = "The fish hums.<|endoftext|>"
    assert tokens[0] == (text, text)
    assert tokens[-1] == ("Say 4.Four.<|endoftext|>", "Four.<|endoftext|>")


@pytest.mark.parametrize("other", [{"text": "The fish hums."}, {"input_ids": [5, 6], "labels": [5, 6]}])
def test_what_is_no_conversation_is_refused_beside_some(tmp_path, other):
    refused = refusal_of(rows_of, tmp_path, [MESSAGES, other])
    assert refused.codes == ["ZR588"]
    assert "0.jsonl: messages, as they are" in refused.why


def test_tools_of_one_entry_and_keywords_of_another(tmp_path, tokenizer):
    """Both are there in all rows, for TRL takes no null for the keywords."""
    tool = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
    with_tools = MESSAGES | {"tools": [tool]}
    mixed = rows_of(tmp_path, [with_tools, MESSAGES | {"chat_template_kwargs": {"loud": True}}])
    assert mixed[0]["tools"][0]["function"]["name"] == "say"
    assert [row["chat_template_kwargs"] for row in mixed] == [{}] * 3 + [{"loud": True}] * 3
    assert len(trained(tmp_path, mixed, tokenizer)) == 6


def loaded(folder: Path, rows: list[dict], **keys):
    return load.load_rows(settings_with(dataset_name=str(written(folder, {"train.jsonl": lines(rows)})), **keys))


@pytest.mark.parametrize("streams", [False, True])
def test_rows_of_one_file_may_have_two_forms(tmp_path, streams):
    rows, _, (form,) = loaded(tmp_path, [MESSAGES, PAIR, TEXTS], dataset_format=None, dataset_streaming=streams)
    made = list(rows)
    assert [len(row["messages"]) for row in made] == [2, 2, 2]
    assert sorted(row["prompt_turns"] for row in made) == [0, 1, 1]
    assert form.description.count(", or ") == 2


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([MESSAGES, PAIR, MESSAGES | PAIR], "row 2 of train: has values for two forms"),
        ([MESSAGES, PAIR, {"question": "Say 5."}], "row 2 of train: answer is None"),
        ([MESSAGES, PAIR, {"note": "nothing"}], "row 2 of train: "),
    ],
)
def test_a_row_of_two_forms_or_of_none_is_refused(tmp_path, rows, fault):
    refused = refusal_of(loaded, tmp_path, rows, dataset_format=None)
    assert refused.codes == ["ZR524"] and fault in refused.what


def test_columns_that_all_rows_have_are_no_second_form(tmp_path):
    """As before: the conversation is trained, and the rest is not used. A row without it is named."""
    rows, _, (form,) = loaded(tmp_path, [MESSAGES | PAIR] * 3, dataset_format=None)
    assert rows.column_names == ["messages"] and "not used: question, answer" in form.description
    (tmp_path / "more").mkdir()
    partly = [MESSAGES | PAIR, PAIR | {"messages": None, "question": None}]
    assert refusal_of(loaded, tmp_path / "more", partly, dataset_format=None).codes == ["ZR524"]
