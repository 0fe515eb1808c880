"""Rows of any form train as the same turns; the assistant's tokens are found without `{% generation %}`."""

from pathlib import Path

import pytest
import trl
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, CHATML, arguments, lines, parquet, prepared, written
from tests.helpers.tiny import settings_with
from zero_recipes.core.findings import Refusal
from zero_recipes.data import forms, load
from zero_recipes.data.prepare import prepare_split
from zero_recipes.data.turns import mask_by

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
        assert all(name in said for name in row if name not in ("id", "level")), said
        answers = [text for text, carries in data.shown[1][0][1] if carries]
        assert answers == [f"{answer}<|endoftext|>" for _, answer in TURNS[:count]]
    assert all(each == found[0] for each in found)


def test_a_pair_without_assistant_only_loss_trains_its_answer_alone(tmp_path):
    data = prepared(
        written(tmp_path, {"train.csv": b"ask,reply\nSay 1.,Word 1.\n"}), columns={"question": "ask", "answer": "reply"}
    )
    assert [text for text, carries in data.shown[1][0][1] if carries] == ["Word 1.<|endoftext|>"]
    with pytest.raises(Refusal, match="ZR890"):
        prepared(tmp_path / "data", template=None, columns={"question": "ask", "answer": "reply"})


@pytest.mark.parametrize(
    "row", [{"question": "a", "answer": "b", "output": "c"}, {"answer": "b"}, {"question": "a", "answer": ["b"]}]
)
def test_what_could_be_two_things_is_not_guessed(row):
    assert forms.recognise(row, settings_with(dataset_format=None), None) is None


def test_a_mixture_is_drawn_by_its_weights_whatever_forms_its_entries_have(tmp_path):
    chats = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 300
    files = {"chats.jsonl": lines(chats), "pairs.jsonl": lines([{"ask": "c", "reply": "d"}] * 100)}
    folder = written(tmp_path, files)
    entries = [{"path": "json", "data_files": str(folder / name)} for name in files]
    more = {"columns": {"question": "ask", "answer": "reply"}}
    keys = {"assistant_only_loss": True, "dataset_format": None, "seed": 3}
    mixed = [entries[0] | {"weight": 3}, entries[1] | {"weight": 1} | more]
    rows = load.load_rows(settings_with(datasets=mixed, **keys)).train
    share = sum(row["messages"][0]["content"] == "c" for row in rows) / len(rows)
    assert 0.15 < share < 0.35 and len(rows) <= 410
    whole = load.load_rows(settings_with(datasets=mixed, mixture_stopping_strategy="all_exhausted", **keys)).train
    assert len(whole) >= len(rows)
    added = load.load_rows(settings_with(datasets=[entries[0], entries[1] | more], **keys))
    assert len(added.train) == 400 and len(added.forms) == 2
    with pytest.raises(Refusal, match="must be set for all entries"):
        load.load_rows(settings_with(datasets=[mixed[0], entries[1] | more], **keys))


# a template as its model's repository has it: the token that ends a turn, what it puts before the last answer, and what
# it writes after a turn
STOCK = {
    "llama3_1": ("<|eot_id|>", "", ""),
    "qwen3": ("<|im_end|>", "<think>\n\n</think>\n\n", "\n"),
    "gemma3": ("<end_of_turn>", "", "\n"),
}
WORDS = st.lists(st.sampled_from(["fish", "Say", "red.", "The", "1", "\n", "user", "cat"]), min_size=1, max_size=6)
TEXT = WORDS.map(" ".join).filter(str.strip).map(str.strip)


@pytest.mark.parametrize("name", STOCK)
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_the_mask_of_a_stock_template_is_the_one_made_by_hand(tmp_path, name, turns):
    end, thoughts, after = STOCK[name]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    named = ["<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<start_of_turn>", end]
    tokenizer.add_tokens(named, special_tokens=True)
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
    pairs = [turn for pair in turns for turn in zip(("user", "assistant"), pair, strict=True)]
    rows = Dataset.from_list([{"messages": [{"role": role, "content": text} for role, text in pairs]}])
    for how, tail in (("answer", ""), ("turn", after)):
        args = arguments(tmp_path, assistant_only_loss=True, max_length=None)
        args.assistant_mask = how
        row = prepare_split(rows, tokenizer, args, False)[0].ready[0]
        answers = [f"{answer}{end}{tail}" for _, answer in turns]
        answers[-1] = (thoughts if how == "turn" else "") + answers[-1]
        assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "".join(answers)
        whole = tokenizer.apply_chat_template(rows[0]["messages"])["input_ids"]
        assert row["input_ids"] == whole, "the text is the template's own"


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
