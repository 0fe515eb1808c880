"""Parts, tool calls and thoughts of a row: each text trains once, as it is written, or its row is refused by name."""

import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, CHATML, lines, prepared, written
from tests.helpers.drawn_rows import END, TEMPLATE
from tests.helpers.tiny import settings_with
from tests.helpers.tools import refusal_of
from zero_recipes.core.findings import Refusal
from zero_recipes.data import forms
from zero_recipes.data.prepare import Prepared

TOKENIZER = AutoTokenizer.from_pretrained(BASE)
HEAD = "{% for m in messages %}<{{ m['role'] }}>\n"
TAIL = END + "\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
THOUGHTS = "{% if m['reasoning_content'] %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
BLOCK = (  # as Qwen3.8 has it: always there, and no look at the content
    "{% if m['role'] == 'assistant' %}<think>\n{{ (m['reasoning_content'] or '') | trim }}\n</think>\n\n{% endif %}"
)
CONTENT = "{{ m['content'] or '' }}"
CALLS = "{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['name'] }} ARGUMENTS</call>{% endfor %}"
AS_JSON = CALLS.replace("ARGUMENTS", "{{ c['function']['arguments'] | tojson }}")
AS_TAGS = CALLS.replace(
    "ARGUMENTS", "{% for k, v in c['function']['arguments'] | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
)
AS_TEXT = CALLS.replace("ARGUMENTS", "{{ '' + c['function']['arguments'] }}")
TEMPLATES = {
    "json": HEAD + THOUGHTS + CONTENT + AS_JSON + TAIL,
    "tags": HEAD + THOUGHTS + CONTENT + AS_TAGS + TAIL,
    "text": HEAD + THOUGHTS + CONTENT + AS_TEXT + TAIL,
    "block": HEAD + BLOCK + CONTENT + AS_JSON + TAIL,
    "contents alone": HEAD + CONTENT + TAIL,
}
ASK = {"role": "user", "content": "Where?"}
RESULT = {"role": "tool", "content": "Found."}
ROWS = {"assistant_only_loss": True, "max_length": None}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def answer(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def chat(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(turns)}


def part(text: str, **keys: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **keys}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look_up", "arguments": arguments}}]


def made(folder: Path, template: str, *rows: dict[str, Any], **keys: Any) -> Prepared:
    return prepared(written(folder, {"train.jsonl": lines([*rows])}), template, **ROWS | keys)


def refused(folder: Path, template: str, *rows: dict[str, Any], **keys: Any) -> Refusal:
    return refusal_of(made, folder, template, *rows, **keys)


def with_loss(row: dict[str, Any]) -> str:
    """What of a tokenized row has a loss."""
    return TOKENIZER.decode([label for label in row["labels"] if label != -100])


def codes(data: Prepared) -> list[str]:
    return [finding.code for finding in data.findings]


# parts


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"loss": False}, {"trainable": 0}])
@pytest.mark.parametrize("template", [TEMPLATE, CHATML, TEMPLATES["block"]])
def test_a_part_that_is_not_to_be_trained_has_no_loss(tmp_path, flag, template):
    parts = [part("Do not train this. ", **flag), part("Train this."), part(" Nor that.", **flag)]
    data = made(tmp_path, template, chat(ASK, answer(parts), ASK, answer("Here.")))
    (row,) = data.train
    assert "Do not train this. Train this. Nor that." in TOKENIZER.decode(row["input_ids"])
    trained = with_loss(row)
    assert "Train this." in trained and "Here." in trained
    assert "Do not" not in trained and "Nor" not in trained and "that" not in trained
    assert set(codes(data)) <= {"ZR580"}


def test_a_part_of_a_user_counts_where_all_turns_have_a_loss(tmp_path):
    row = chat({"role": "user", "content": [part("A secret. "), part("A question.", train=False)]}, answer("Yes."))
    trained = with_loss(made(tmp_path, TEMPLATE, row, assistant_only_loss=False).train[0])
    assert "A secret." in trained and "question" not in trained and "Yes." in trained


def test_thoughts_in_a_part_without_a_loss_keep_it_with_their_tags(tmp_path):
    parts = [part("<think>\nNo thought of mine.\n</think>\n\n", train=False), part("A fish.")]
    (row,) = made(tmp_path, TEMPLATES["block"], chat(ASK, answer(parts))).train
    assert TOKENIZER.decode(row["input_ids"]).count("<think>") == 1
    assert with_loss(row).strip() == f"A fish.{END}"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part("a"), part("b", loss_mask=0)], "part 1 of message 1 of messages has `loss_mask`"),
        ([part("a", supervised=False)], "part 0 of message 1 of messages has `supervised`"),
        ([part("a", weight=0.5)], "`weight` of part 0 of message 1 of messages is 0.5, not 0 or 1"),
        ([part("a", train=True, weight=0)], "part 0 of message 1 of messages has weight and train, which contradict"),
    ],
)
def test_a_part_with_a_key_of_unknown_meaning_is_refused(tmp_path, parts, words):
    refusal = refused(tmp_path, TEMPLATE, chat(ASK, answer("a")), chat(ASK, answer(parts)))
    assert refusal.codes == ["ZR524"]
    assert refusal.what.startswith("row 1 of train: ") and words in refusal.what


def test_a_part_with_a_loss_in_a_message_without_one_is_refused(tmp_path):
    refusal = refused(tmp_path, TEMPLATE, chat(ASK, answer([part("a", train=True)], weight=0), ASK, answer("b")))
    assert "part 0 of message 1 of messages has a loss, but its message has none" in refusal.what


def test_keys_that_say_nothing_of_a_loss_are_left_out(tmp_path):
    parts = [part("A fish.", cache_control={"type": "ephemeral"}, annotations=[], note=None)]
    assert "A fish." in with_loss(made(tmp_path, TEMPLATE, chat(ASK, answer(parts))).train[0])


def test_a_part_whose_place_is_not_certain_is_refused(tmp_path):
    upper = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    refusal = refused(tmp_path, upper, chat(ASK, answer([part("Not this. ", train=False), part("This.")])))
    assert refusal.codes == ["ZR577"] and "row 0, message 1, part 0" in refusal.what


# tool calls


@pytest.mark.parametrize(("template", "words"), [
    ("json", 'look_up {"city": "Rome", "n": 1}'), ("tags", "look_up <city>Rome</city><n>1</n>"),
    ("text", 'look_up {"city": "Rome", "n": 1}'), ("block", 'look_up {"city": "Rome", "n": 1}'),
])  # fmt: skip
def test_arguments_as_text_and_as_a_mapping_train_as_the_same_tokens(tmp_path, template, words):
    arguments = {"city": "Rome", "n": 1}
    rows = []
    for form in (json.dumps(arguments), arguments):
        rows.append(chat(ASK, answer("", tool_calls=call(form)), RESULT, answer("Done.")))
    data = made(tmp_path, TEMPLATES[template], *rows)
    assert data.train[0]["input_ids"] == data.train[1]["input_ids"]
    assert f"<call>{words}</call>" in with_loss(data.train[0])
    assert set(codes(data)) <= {"ZR580"}


def test_a_template_that_takes_text_writes_it_as_the_row_has_it(tmp_path):
    data = made(tmp_path, TEMPLATES["text"], chat(ASK, answer("", tool_calls=call('{"city":"Rome"}'))))
    assert '<call>look_up {"city":"Rome"}</call>' in with_loss(data.train[0])


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_no_arguments_are_an_empty_mapping(tmp_path, nothing):
    data = made(tmp_path, TEMPLATES["json"], chat(ASK, answer("", tool_calls=call(nothing))))
    assert "<call>look_up {}</call>" in with_loss(data.train[0])


def test_flat_calls_and_calls_that_are_text_themselves_are_read(tmp_path):
    flat = TEMPLATES["json"].replace("c['function']", "c")
    rows = []
    for arguments in ({"city": "Rome"}, '{"city": "Rome"}'):
        calls = [{"name": "look_up", "arguments": arguments}]
        rows += [chat(ASK, answer("", tool_calls=calls)), chat(ASK, answer("", tool_calls=json.dumps(calls)))]
    trained = {with_loss(row) for row in made(tmp_path, flat, *rows).train}
    assert trained == {f'<call>look_up {{"city": "Rome"}}</call>{END}\n'}


@pytest.mark.parametrize("text", ["ls -l", '{"a": 1', "[1]", '"{}"', '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_arguments_that_are_no_json_object_are_refused(tmp_path, text):
    sound = chat(ASK, answer("a"))
    refusal = refused(tmp_path, TEMPLATES["json"], sound, chat(ASK, answer("", tool_calls=call({}) + call(text))))
    assert refusal.codes == ["ZR576"] and "row 1, message 1, tool call 1" in refusal.what


PYTHONS = TEMPLATES["json"].replace("tojson }}", "string if c['function']['arguments'] is mapping }}")


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        (TEMPLATES["json"].replace("['arguments'] | tojson", "['arguments'] | tojson | tojson"), "ZR578", "once more"),
        (PYTHONS, "ZR578", "as Python writes them: {'city':'Rome'}"),
        (TEMPLATES["contents alone"], "ZR528", "message 1 (assistant), tool call 0, its name"),
        (HEAD + CONTENT + CALLS + TAIL, "ZR528", "message 1 (assistant), tool call 0, its arguments"),
    ],
)
def test_arguments_that_a_template_changes_or_leaves_out_are_found(tmp_path, template, code, words):
    refusal = refused(tmp_path, template, chat(ASK, answer("", tool_calls=call({"city": "Rome"}))))
    assert refusal.codes == [code] and words in refusal.what and "in row 0" in refusal.what


def test_a_call_of_openais_first_api_is_not_dropped_in_silence(tmp_path):
    older = {"name": "look_up", "arguments": '{"city": "Rome"}'}
    refusal = refused(tmp_path, TEMPLATES["json"], chat(ASK, answer("Well.", function_call=older)))
    assert refusal.codes == ["ZR528"] and "tool call 0" in refusal.what


# messages as text


def test_messages_as_json_text_are_messages(tmp_path):
    turns = [ASK, answer("A fish.", weight=1), ASK, answer("A bird.", weight=0)]
    as_text = {"messages": json.dumps(turns)}
    data = made(tmp_path, TEMPLATE, as_text, as_text)
    (tmp_path / "other").mkdir()
    same = made(tmp_path / "other", TEMPLATE, chat(*turns), chat(*turns))
    assert list(data.train) == list(same.train)
    assert "A fish." in with_loss(data.train[0]) and "A bird." not in with_loss(data.train[0])


def test_json_text_of_prompts_and_completions_is_not_trained_as_text(tmp_path):
    row = {"prompt": json.dumps([ASK]), "completion": json.dumps([answer("A fish.")])}
    assert with_loss(made(tmp_path, TEMPLATE, row).train[0]) == f"A fish.{END}\n"


def test_texts_that_begin_as_a_list_stay_texts(tmp_path):
    rows = [{"text": "[INST] a"}, {"text": json.dumps([ASK])}]
    data = made(tmp_path, TEMPLATE, *rows, assistant_only_loss=False)
    assert '[{"role": "user"' in with_loss(data.train[1])


def test_a_row_of_text_among_messages_as_text_is_refused_by_its_row(tmp_path):
    sound = {"messages": json.dumps([ASK, answer("A fish.")])}
    refusal = refused(tmp_path, TEMPLATE, sound, {"messages": "hello"})
    assert refusal.codes == ["ZR524"] and "row 1 of train: messages is 'hello', not a list" in refusal.what


def test_pythons_spelling_of_messages_is_refused_with_the_right_fix(tmp_path):
    refusal = refused(tmp_path, TEMPLATE, {"messages": str([ASK, answer("A fish.")])})
    assert refusal.codes == ["ZR583"] and "json.dumps" in refusal.fix and "dataset_text_field" not in refusal.fix


# thoughts

THINKS = "<think>\nHmm, a fish.\n</think>\n\n"


@pytest.mark.parametrize(
    "turn",
    [
        answer("Red.", reasoning_content="Hmm, a fish."),
        answer("Red.", reasoning="Hmm, a fish."),
        answer("Red.", thinking="Hmm, a fish."),
        answer("Red.", thought="Hmm, a fish."),
        answer(THINKS + "Red."),
        answer("Hmm, a fish.\n</think>\n\nRed."),
    ],
)
@pytest.mark.parametrize("template", ["json", "block"])
def test_thoughts_train_once_wherever_they_are(tmp_path, turn, template):
    data = made(tmp_path, TEMPLATES[template], chat(ASK, turn))
    assert with_loss(data.train[0]) == f"{THINKS}Red.{END}\n"
    assert codes(data) == []


@pytest.mark.parametrize("content", ["Well. <think>Hmm.</think> Red.", THINKS + THINKS + "Red."])
def test_thoughts_that_cannot_be_split_are_refused_behind_an_empty_block(tmp_path, content):
    refusal = refused(tmp_path, TEMPLATES["block"], chat(ASK, answer("a", reasoning="b")), chat(ASK, answer(content)))
    assert refusal.codes == ["ZR584"] and "in row 1, message 1 (assistant)" in refusal.what
    (tmp_path / "plain").mkdir()
    assert content in with_loss(made(tmp_path / "plain", TEMPLATE, chat(ASK, answer(content))).train[0])


def test_thoughts_that_the_template_does_not_write_are_found(tmp_path):
    refusal = refused(tmp_path, TEMPLATE, chat(ASK, answer("Red.", reasoning="Hmm, a fish.")))
    assert refusal.codes == ["ZR528"] and "message 1 (assistant), reasoning: Hmm, a fish." in refusal.what


def test_thoughts_of_earlier_answers_that_are_left_out_are_said(tmp_path):
    last_alone = TEMPLATES["json"].replace(
        "{% if m['reasoning_content'] %}", "{% if m['reasoning_content'] and loop.last %}"
    )
    row = chat(ASK, answer("Red.", reasoning="Hmm, a fish."), ASK, answer("Blue.", reasoning="Well, a bird."))
    data = made(tmp_path, last_alone, row)
    assert codes(data) == ["ZR579"] and "1 of 1 rows" in data.findings[0].what
    assert "message 1 (assistant)" in data.findings[0].what


def test_an_empty_block_that_would_be_trained_is_said_with_a_fix(tmp_path):
    rows = [chat(ASK, answer("Red.")), chat(ASK, answer("Red.", reasoning="Hmm.")), chat(ASK, answer("Blue."))]
    data = made(tmp_path, TEMPLATES["block"], *rows, thinking="keep")
    assert codes(data) == ["ZR580"] and "2 of 3 rows of train" in data.findings[0].what
    assert with_loss(data.train[0]).startswith("<think>") and "thinking: mask_empty" in data.findings[0].fix
    (tmp_path / "fixed").mkdir()
    fixed = made(tmp_path / "fixed", TEMPLATES["block"], *rows, thinking="mask_empty")
    assert codes(fixed) == [] and with_loss(fixed.train[0]) == f"Red.{END}\n"


@pytest.mark.parametrize("content", ["A fish hums.", "assistant", "user"])
def test_a_text_that_a_template_writes_twice_is_found(tmp_path, content):
    row = chat(ASK, answer(content), {"role": "user", "content": "assistant or user?"}, answer("Yes."))
    assert codes(made(tmp_path, TEMPLATE, row)) == []
    (tmp_path / "twice").mkdir()
    twice = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if loop.index0 == 1 %} {{ m['content'] }}{% endif %}"
    )
    refusal = refused(tmp_path / "twice", twice, row)
    assert refusal.codes == ["ZR578"] and "message 1 (assistant) stands there more often" in refusal.what


# what a template raises

STOPS = "{% for m in messages %}{% if 'stop' in m['content'] %}{{ raise_exception('no!') }}{% endif %}{% endfor %}"
BAD = chat(ASK, answer("a"), {"role": "user", "content": "stop"}, answer("b"))


@pytest.mark.parametrize("keys", [{}, {"assistant_only_loss": False}, {"dataset_num_proc": 2},
                                  {"dataset_streaming": True, "max_steps": 1}])  # fmt: skip
def test_what_a_template_raises_names_the_row_and_the_message(tmp_path, keys):
    sound = chat(ASK, answer("a"))
    refusal = refused(tmp_path, STOPS + TEMPLATE, sound, sound, BAD, sound, **keys)
    assert refusal.codes == ["ZR199"] and "no!" in refusal.why
    assert "row 2 of train, message 2 (user)" in refusal.what


def test_what_a_template_raises_while_a_turn_is_masked_names_the_row(tmp_path):
    needs_answer = "{% if messages | length == 3 %}{{ raise_exception('no!') }}{% endif %}" + TEMPLATE
    refusal = refused(tmp_path, needs_answer, chat(ASK, answer("a")), chat(ASK, answer("a"), ASK, answer("b")))
    assert refusal.codes == ["ZR199"] and "row 1 up to message 3" in refusal.what


# the cache


def test_rows_that_earlier_code_converted_are_not_taken_from_the_cache(monkeypatch):
    rows = Dataset.from_list([chat(ASK, answer("a"))])
    form = forms.recognise(forms.column_kinds(rows), settings_with(dataset_format=None), None)
    now = forms.convert(rows, form)._fingerprint
    assert forms.convert(rows, form)._fingerprint == now
    monkeypatch.setattr(forms, "code_digest", lambda: "of another version")
    assert forms.convert(rows, form)._fingerprint != now


# any conversation


@st.composite
def conversations(draw) -> tuple[list[dict[str, Any]], dict[str, bool], set[str]]:
    """(a row's turns, {each text of an answer: whether it has a loss}, what they hold)."""
    turns = []
    texts = {}
    holds = set()
    numbers = iter(range(1000))

    def text(has_loss: bool) -> str:
        words = f"{draw(st.sampled_from(['fish', 'Say', 'red', 'Ünï', '語']))} {next(numbers) + 1000} hums"
        texts[words] = has_loss
        return words

    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": f"Ask {next(numbers) + 1000}."})
        turn = answer("")
        has_loss = draw(st.integers(0, 3)) > 0
        if not has_loss:
            turn["weight"] = 0
        where = draw(st.sampled_from([None, "reasoning_content", "reasoning", "thinking", "inline", "unclosed"]))
        before = ""
        if where == "inline":
            before = f"<think>\n{text(has_loss)}\n</think>\n\n"
        elif where == "unclosed":
            before = f"<think>\n{text(has_loss)}\n"
        elif where is not None:
            turn[where] = text(has_loss)
        holds.add(where)
        if draw(st.booleans()):
            parts = []
            for number in range(draw(st.integers(1, 3))):
                flag = draw(st.sampled_from([None, None, 1, 0, False]))
                is_silent = not has_loss or (flag is not None and not flag)
                words = text(not is_silent)
                flags = {} if flag is None or (flag and not has_loss) else {"train": flag}
                parts.append(part((before if number == 0 else "") + words + " ", **flags))
                if number == 0 and before and is_silent:
                    texts[before.removeprefix("<think>\n").split("\n")[0]] = False
            turn["content"] = parts
        else:
            turn["content"] = before + text(has_loss)
        if draw(st.booleans()):
            holds.add("calls")
            arguments = {"city": text(has_loss), "days": [1, None, True]}
            as_text = json.dumps(arguments, ensure_ascii=False)
            turn["tool_calls"] = call(draw(st.sampled_from([arguments, as_text])))
            turns += [turn, {"role": "tool", "content": f"Found {next(numbers) + 1000}."}]
            turn = answer(text(True))
        turns.append(turn)
    turns += [{"role": "user", "content": "And?"}, answer(text(True))]
    return turns, texts, holds


@pytest.mark.parametrize("examples", [12, pytest.param(250, marks=pytest.mark.grid)])
def test_each_text_of_a_row_trains_once_or_the_row_is_refused(examples):
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.sampled_from([*TEMPLATES]), conversations())
    def holds_for(name, drawn):
        turns, texts, holds = drawn
        fields = holds & {"reasoning_content", "reasoning", "thinking"}
        cannot = name == "contents alone" and (fields or "calls" in holds)
        cannot = cannot or (name != "contents alone" and "unclosed" in holds)
        with tempfile.TemporaryDirectory() as folder:
            data = written(
                Path(folder), {"train.jsonl": lines([chat(ASK, answer("First.", reasoning="x")), chat(*turns)])}
            )
            if name == "contents alone":
                (data / "train.jsonl").write_bytes(lines([chat(ASK, answer("First.")), chat(*turns)]))
            try:
                made_of_it = prepared(data, TEMPLATES[name], **ROWS)
                row = list(made_of_it.train)[1]
            except Refusal as refusal:
                assert cannot, str(refusal)
                assert "row 1" in refusal.what, str(refusal)
                return
        if cannot:  # texts without a loss, or thoughts of earlier answers
            assert {"ZR528", "ZR579"} & {*codes(made_of_it)}, turns
            return
        whole = TOKENIZER.decode(row["input_ids"])
        trained = with_loss(row)
        for text, has_loss in texts.items():
            assert whole.count(text) == 1, (name, text, whole)
            assert trained.count(text) == (1 if has_loss else 0), (name, text, trained)

    holds_for()
