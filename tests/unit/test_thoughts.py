"""Thoughts: one block an answer, with a loss as `thinking` says. Tool calls under templates of the field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trl
from datasets import Dataset
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from tests.helpers.bad_data import BASE, arguments, lines, prepared, written
from tests.helpers.drawn_rows import END
from tests.helpers.tools import refusal_of
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.data import as_written
from zero_recipes.data.as_read import Reads, without_thinking
from zero_recipes.data.audit import RowKeys, decoded_parts
from zero_recipes.data.masks import tokenise
from zero_recipes.data.prepare import prepare_split
from zero_recipes.data.samples import choose_samples
from zero_recipes.data.thoughts import THINK, Tags, tags_around, tags_of_empty_block

ASK = {"role": "user", "content": "Where?"}
THOUGHT = "Hmm fish."


PLAIN = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}" + END + "\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>\n{% endif %}"


class Family(NamedTuple):
    """How a chat template writes thoughts."""

    opened: str
    closed: str
    empty: str = ""  # in place of a block, before an answer without thoughts
    earlier: str | None = None  # in place of any block, before answers to earlier questions; None: as before the last
    looks_at_content: bool = False
    switch: str | None = None  # that has it write the thoughts of earlier answers


THINKS = ("<think>\n", "\n</think>\n\n")
EMPTY = "<think>\n\n</think>\n\n"
FAMILIES = {
    "as Qwen3": Family(*THINKS, EMPTY, "", looks_at_content=True),
    "as Qwen3.5": Family(*THINKS, EMPTY, looks_at_content=True),
    "as Qwen3.8": Family(*THINKS, EMPTY, "", switch="preserve_thinking"),
    "as GLM-4.5": Family("<think>", "</think>\n", "<think></think>\n", "<think></think>\n", looks_at_content=True),
    "as GLM-4.7": Family("<think>", "</think>", "</think>", "</think>"),
    "as Nemotron 3": Family("<think>\n", "\n</think>\n", "<think></think>"),
    "as Ministral 3": Family("[THINK]", "[/THINK]"),
    "as Gemma 4": Family("<|channel>thought\n", "\n<channel|>", earlier=""),
    "as Seed-OSS": Family("<seed:think>", "</seed:think>", "<seed:think></seed:think>"),
}
TAGS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<seed:think>", "</seed:think>"]


LAST_QUESTION = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
SPLIT = (
    "{%- if m.reasoning_content is not string and '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
)
ANSWER = (
    "{{- content -}}{%- for c in m.tool_calls or [] -%}{{- '<call>' + c.function.name -}}"
    "{%- for k, v in c.function.arguments | items -%}{{- '<' + k + '>' + v -}}{%- endfor -%}{%- endfor -%}"
)


def template_of(family: Family) -> str:
    """A chat template with `{% generation %}`."""
    writes_block = "true" if family.earlier is None else "loop.index0 > ns.last"
    if family.switch is not None:
        writes_block += f" or {family.switch} is true"
    block = f"({json.dumps(family.opened)} + thought + {json.dumps(family.closed)})"
    answer = "{%- set content = m.content or '' -%}{%- set thought = m.reasoning_content or '' -%}"
    if family.looks_at_content:
        answer += SPLIT
    answer += "{%- generation -%}{%- if " + writes_block + " -%}"
    answer += "{{- " + block + " if thought else " + json.dumps(family.empty) + " -}}"
    answer += "{%- else -%}{{- " + json.dumps(family.earlier or "") + " -}}{%- endif -%}"
    answer += ANSWER + "{{- '" + END + "' -}}{%- endgeneration -%}"
    turns = "{%- for m in messages -%}{{- '<' + m.role + '>\\n' -}}{%- if m.role == 'assistant' -%}" + answer
    turns += "{%- else -%}{{- m.content + '" + END + "' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    return LAST_QUESTION + turns + "{%- if add_generation_prompt -%}{{- '<assistant>\\n' -}}{%- endif -%}"


def without_markers(template: str) -> str:
    """The template without `{% generation %}`."""
    return template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


def with_prompt(template: str, prompt: str) -> str:
    """The template with more in its prompt to answer."""
    bare = "{{- '<assistant>\\n' -}}{%- endif -%}"
    assert template.endswith(bare)
    return template.removesuffix("{%- endif -%}") + prompt + "{%- endif -%}"


def tokenizer_of(template: str) -> Tokenizer:
    """The tiny world's, with a token for each tag."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_tokens([*TAGS, "<user>", "<assistant>", "<tool>", "<call>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def answer(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look_up", "arguments": arguments}}]


def split_of(tokenizer: Tokenizer, folder: Path, *rows: list[dict], thinking: str = "mask_empty", **keys: Any):
    """(the split, codes of its findings but ZR514: these templates end with a token of their own)."""
    mask = keys.pop("assistant_mask", None)
    data = Dataset.from_list([{"messages": row} for row in rows], on_mixed_types="use_json")
    args = arguments(folder, **{"max_length": None, "assistant_only_loss": True} | keys)
    split, findings = prepare_split(data, tokenizer, args, args.packing, RowKeys(mask, thinking=thinking))
    return split, [finding.code for finding in findings if finding.code != "ZR514"]


def trained(tokenizer: Tokenizer, row: dict[str, Any]) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


# the tags


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tags_of_a_template_are_found(name):
    family = FAMILIES[name]
    tags = Reads.of(tokenizer_of(template_of(family))).tags
    expected = Tags(family.opened.strip(), family.closed.strip(), name == "as GLM-4.7")
    assert tags == expected


def test_channels_and_headers_are_no_tags_of_thoughts():
    channels = "<|message|>a<|end|><|start|>x<|message|>b<|end|>"
    assert tags_around("a", "b", channels, "<|start|>x<|message|>b<|end|>") is None
    assert tags_of_empty_block("b", "<role>assistant</role>b") is None
    assert tags_of_empty_block("b", "<x><think>\n</think>\nb") == THINK
    assert tags_of_empty_block("b", "<|x|></think>b") == Tags("<think>", "</think>", True)


# one block

SAME = [
    answer("Red.", reasoning_content=THOUGHT),
    answer("Red.", reasoning=THOUGHT),
    answer("Red.", thinking=THOUGHT),
    answer("Red.", thinking=THOUGHT, reasoning=THOUGHT),
    answer(f"<think>\n{THOUGHT}\n</think>\n\nRed.", reasoning_content=THOUGHT),
    answer(f"<think>\n{THOUGHT}\n</think>\n\nRed.", reasoning=""),
    answer("<think>\n\n</think>\n\nRed.", reasoning_content=THOUGHT),
    answer(f"<think>\n{THOUGHT}\n</think>\n\nRed."),
    answer(f"{THOUGHT}\n</think>\n\nRed."),
]


@pytest.mark.parametrize("name", ["as Qwen3", "as Qwen3.8", "as GLM-4.7", "as Ministral 3", "as Gemma 4"])
def test_thoughts_become_one_block_wherever_they_are(tmp_path, name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(template_of(family))
    rows = [*SAME, answer(f"{family.opened}{THOUGHT}{family.closed}Red.")]
    split, codes = split_of(tokenizer, tmp_path, *([ASK, row] for row in rows))
    assert [trained(tokenizer, row) for row in split.ready] == [
        f"{family.opened}{THOUGHT}{family.closed}Red.{END}"
    ] * len(rows)
    assert codes == [] and split.thoughts == f"thoughts: {len(rows)} trained"


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        (answer("<think>Hmm fish."), "ZR585", "begins with <think>"),
        (answer("\n [THINK]Hmm fish."), "ZR585", "begins with [THINK]"),
        (answer("<think>\nA bird.\n</think>\n\nRed.", reasoning="Hmm."), "ZR586", "reasoning and content"),
        (answer("Red.", reasoning="Hmm.", thinking="A bird."), "ZR586", "reasoning and thinking"),
    ],
)
@pytest.mark.parametrize("streams", [{}, {"dataset_streaming": True, "max_steps": 1}])
def test_thoughts_that_are_not_clear_are_refused_by_row(tmp_path, row, code, words, streams):
    template = template_of(FAMILIES["as Ministral 3"])
    data = written(tmp_path, {"train.jsonl": lines([{"messages": [ASK, turn]} for turn in (answer("Red."), row)])})
    refusal = refusal_of(prepared, data, template, assistant_only_loss=True, **streams)
    assert refusal.codes == [code] and "row 1, message 1" in refusal.what and words in refusal.what


def test_thoughts_without_a_template_for_them_stay_text(tmp_path):
    tokenizer = tokenizer_of(PLAIN)
    contents = ["<think>Hmm fish.", EMPTY + "Red.", f"<think>{THOUGHT}</think>Red."]
    split, codes = split_of(tokenizer, tmp_path, *([ASK, answer(text)] for text in contents), assistant_mask="turn")
    assert [trained(tokenizer, row) for row in split.ready] == [f"{text}{END}\n" for text in contents]
    assert codes == []


# what the recipe says

TWO = [ASK, answer("Blue.", reasoning="Well bird."), ASK, answer(f"<think>\n{THOUGHT}\n</think>\n\nRed."), ASK]
TWO.append(answer("Green."))


@pytest.mark.parametrize(
    ("name", "thinking", "loss", "told", "codes"),
    [
        ("as Qwen3.5", "mask_empty", ["<think>\nWell bird.\n</think>\n\nBlue.", f"<think>\n{THOUGHT}\n</think>\n\nRed.",
         "Green."], "2 trained, 1 empty blocks without a loss", []),
        ("as Qwen3.5", "keep", ["<think>\nWell bird.\n</think>\n\nBlue.", f"<think>\n{THOUGHT}\n</think>\n\nRed.",
         EMPTY + "Green."], "2 trained, 1 empty blocks trained", ["ZR580"]),
        ("as Qwen3.5", "last", ["Blue.", "Red.", "Green."],
         "2 removed by `thinking`, 3 empty blocks without a loss", []),
        ("as Qwen3.5", "drop", ["Blue.", "Red.", "Green."],
         "2 removed by `thinking`, 3 empty blocks without a loss", []),
        ("as Qwen3.8", "mask_empty", ["Blue.", "Red.", "Green."],
         "2 left out by the chat template, 1 empty blocks without a loss", ["ZR579"]),
        ("as Qwen3.8", "keep", ["<think>\nWell bird.\n</think>\n\nBlue.", f"<think>\n{THOUGHT}\n</think>\n\nRed.",
         EMPTY + "Green."], "2 trained, 1 empty blocks trained", ["ZR580"]),
        ("as GLM-4.5", "mask_empty", ["Blue.", "Red.", "Green."],
         "2 left out by the chat template, 3 empty blocks without a loss", ["ZR579"]),
        ("as GLM-4.7", "mask_empty", ["Blue.", "Red.", "Green."],
         "2 left out by the chat template, 3 empty blocks without a loss", ["ZR579"]),
    ],
)  # fmt: skip
def test_thinking_says_what_of_thoughts_is_trained(tmp_path, name, thinking, loss, told, codes):
    tokenizer = tokenizer_of(template_of(FAMILIES[name]))
    split, found = split_of(tokenizer, tmp_path, TWO, thinking=thinking)
    assert trained(tokenizer, split.ready[0]) == "".join(text + END for text in loss)
    assert split.thoughts == f"thoughts: {told}" and found == codes


def test_last_keeps_the_thoughts_of_all_answers_to_the_last_question(tmp_path):
    tokenizer = tokenizer_of(template_of(FAMILIES["as Qwen3.5"]))
    loop = [answer("", reasoning="Look.", tool_calls=call({"city": "Rome"})), {"role": "tool", "content": "Found."}]
    row = [ASK, answer("Blue.", reasoning="Well bird."), ASK, *loop, answer("Red.", reasoning=THOUGHT)]
    split, _ = split_of(tokenizer, tmp_path, row, thinking="last")
    text = trained(tokenizer, split.ready[0])
    assert "Well bird." not in text and "Look." in text and THOUGHT in text
    assert split.thoughts == "thoughts: 2 trained, 1 removed by `thinking`, 1 empty blocks without a loss"


@pytest.mark.parametrize("keys", [{}, {"packing": True, "max_length": 64}, {"assistant_only_loss": False},
                                  {"assistant_mask": "turn"}, {"assistant_mask": "answer"}])  # fmt: skip
def test_an_empty_block_has_no_loss_under_any_mask(tmp_path, keys):
    """Exact in tokens: the tags, and the white space between and behind them."""
    template = template_of(FAMILIES["as Qwen3.8"])
    tokenizer = tokenizer_of(without_markers(template) if "assistant_mask" in keys else template)
    quoted = {"role": "user", "content": f"Why {EMPTY}?"}
    rows = [[ASK, answer("Red.")], [quoted, answer("Red.", weight=0), ASK, answer("Blue.")]]
    split, codes = split_of(tokenizer, tmp_path, *rows, **keys)
    parts = [part for row in split.ready for part in decoded_parts(row, tokenizer)]
    without = [text for text, has_loss in parts if not has_loss]
    assert sum(text.endswith(EMPTY) for text in without) == 2 and codes == []
    if keys.get("assistant_only_loss") is False:
        assert [text for text in without if text != EMPTY] == [f"Red.{END}\n"]
        assert any(f"Why {EMPTY}?" in text for text, has_loss in parts if has_loss)
    else:
        assert sorted(text.strip() for text, has_loss in parts if has_loss) == [f"Blue.{END}", f"Red.{END}"]


def test_an_empty_block_of_a_completion_and_of_a_stream_has_no_loss(tmp_path):
    rows = [{"prompt": [ASK], "completion": [answer("Red.")]}] * 2
    data = written(tmp_path, {"train.jsonl": lines(rows)})
    template = template_of(FAMILIES["as Qwen3.8"])
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    for streams in ({}, {"dataset_streaming": True, "max_steps": 1}):
        row = next(iter(prepared(data, template, max_length=None, **streams).train))
        assert trained(tokenizer, row) == f"Red.{END}\n"


def test_a_mask_of_the_answer_begins_with_its_thoughts(tmp_path):
    template = template_of(FAMILIES["as Qwen3.8"])
    tokenizer = tokenizer_of(without_markers(template))
    rows = [[ASK, answer("fish.", reasoning="Hmm fish. Yes.")], [ASK, answer("<think>Hmm fish. Yes.</think>fish.")]]
    split, codes = split_of(tokenizer, tmp_path, *rows, assistant_mask="answer")
    for row in split.ready:
        assert trained(tokenizer, row) == f"<think>\nHmm fish. Yes.\n</think>\n\nfish.{END}"
    assert codes == []


def test_a_prompt_that_opens_a_block_is_no_reason_to_refuse_an_answer_without_one(tmp_path):
    template = with_prompt(template_of(FAMILIES["as Nemotron 3"]), "{{- '<think>\\n' -}}")
    tokenizer = tokenizer_of(without_markers(template))
    split, codes = split_of(tokenizer, tmp_path, [ASK, answer("Red."), ASK, answer("Blue.")], assistant_mask="turn")
    assert trained(tokenizer, split.ready[0]) == f"Red.{END}\nBlue.{END}\n" and codes == []


def test_parts_of_a_content_keep_their_loss_where_thoughts_are_removed(tmp_path):
    tokenizer = tokenizer_of(template_of(FAMILIES["as Qwen3.5"]))
    parts = [{"type": "text", "text": f"<think>\n{THOUGHT}\n</think>\n\nNot this. ", "train": False}]
    parts.append({"type": "text", "text": "This."})
    data = written(tmp_path, {"train.jsonl": lines([{"messages": [ASK, answer(parts)]}])})
    made = prepared(data, tokenizer.chat_template, assistant_only_loss=True, max_length=None, thinking="drop")
    text = trained(tokenizer, made.train[0]).strip()
    assert text == f"This.{END}" and THOUGHT not in tokenizer.decode(made.train[0]["input_ids"])


@pytest.mark.parametrize("thinking", ["drop", "last"])
def test_thoughts_are_removed_from_contents_that_the_template_takes_for_text(tmp_path, thinking):
    tokenizer = tokenizer_of(PLAIN)
    row = [
        ASK,
        answer(f"<think>{THOUGHT}</think>\n\nRed."),
        ASK,
        answer(f"<think>{THOUGHT}</think>Blue.", reasoning=THOUGHT),
    ]
    split, codes = split_of(tokenizer, tmp_path, row, thinking=thinking, assistant_mask="turn")
    last = f"<think>{THOUGHT}</think>" if thinking == "last" else ""
    assert trained(tokenizer, split.ready[0]) == f"Red.{END}\n{last}Blue.{END}\n" and codes == []


@pytest.mark.parametrize("thinking", ["drop", "last"])
def test_thoughts_cannot_be_removed_from_texts(tmp_path, thinking):
    data = written(tmp_path, {"train.jsonl": lines([{"text": "<think>Hmm.</think>Red."}])})
    assert refusal_of(prepared, data, thinking=thinking).codes == ["ZR587"]
    assert prepared(data, thinking="mask_empty").train


def test_rows_are_made_again_where_thinking_is_another(tmp_path):
    data = written(tmp_path, {"train.jsonl": lines([{"messages": [ASK, answer("Red.")]}])})
    template = template_of(FAMILIES["as Qwen3.8"])
    made = [
        prepared(data, template, assistant_only_loss=True, thinking=mode).audit.supervised for mode in ("keep", "drop")
    ]
    assert made[0] > made[1]


def test_a_sample_is_asked_without_thoughts_where_they_are_removed():
    switch = f"{{%- if enable_thinking is false -%}}{{{{- {json.dumps(EMPTY)} -}}}}{{%- endif -%}}"
    tokenizer = tokenizer_of(with_prompt(template_of(FAMILIES["as Qwen3.5"]), switch))
    rows = Dataset.from_list([{"messages": [ASK, answer("Red.")]}])
    prompts = {}
    for mode in ("mask_empty", "drop"):
        prompts[mode] = choose_samples(1, rows, None, tokenizer, ours=RowKeys(thinking=mode))[0].prompt
    assert prompts["mask_empty"].endswith("<assistant>\n") and prompts["drop"].endswith("<assistant>\n" + EMPTY)
    assert without_thinking(tokenizer_of(template_of(FAMILIES["as Qwen3.5"]))) == {}


# templates of the field, as TRL carries them

FOLDER = Path(trl.__file__).with_name("chat_templates")
ROMES = {
    "qwen3": '{"name": "look_up", "arguments": {"city": "Rome"}}',
    "qwen3_5_think": "<function=look_up>\n<parameter=city>\nRome\n</parameter>\n</function>",
    "qwen3_8": "<function=look_up>\n<parameter=city>\nRome\n</parameter>\n</function>",
    "glm4moe": "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", ROMES)
def test_rows_under_templates_of_the_field(tmp_path, name):
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text())
    tokenizer.add_tokens(
        ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>"], special_tokens=True
    )
    calls = [[ASK, answer("", tool_calls=call(form))] for form in ({"city": "Rome"}, '{"city": "Rome"}')]
    rows = [[ASK, answer("Red.")], *calls, *([ASK, row] for row in SAME)]
    split, codes = split_of(tokenizer, tmp_path, *rows)
    plain, as_mapping, as_text, *thinking = [trained(tokenizer, row).strip() for row in split.ready]
    assert plain.removesuffix("<|im_end|>").removesuffix("<|user|>") == "Red."
    assert as_mapping == as_text and ROMES[name] in as_text and "think" not in as_text
    assert len(set(thinking)) == 1 and thinking[0].count("<think>") == thinking[0].count(THOUGHT) == 1
    assert codes == []
    for row, code in (([ASK, answer("<think>Hmm.")], "ZR585"), ([ASK, answer("", tool_calls=call("ls"))], "ZR576")):
        refusal = refusal_of(split_of, tokenizer, tmp_path, [ASK, answer("Red.")], row)
        assert refusal.codes == [code] and "row 1, message 1" in refusal.what


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_8"])
def test_a_row_without_a_users_turn_is_refused_by_row(tmp_path, name):
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text())
    row = [{"role": "system", "content": "Be kind."}, answer("Red.")]
    refusal = refusal_of(split_of, tokenizer, tmp_path, [ASK, answer("Red.")], row)
    assert refusal.codes == ["ZR199"] and "row 1 of the data (roles: system, assistant)" in refusal.what
    assert "No user query found" in refusal.why


# tools


def test_tools_and_their_parameters_may_be_json_text(tmp_path):
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + template_of(FAMILIES["as Ministral 3"])
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    encoded = {"type": "function", "function": {"name": "f", "parameters": json.dumps(parameters)}}
    several = [[tool], json.dumps([tool]), [encoded], json.dumps([encoded]), [json.dumps(tool)], "", None]
    tokenizer = tokenizer_of(template)
    for forms in (several, [[encoded], None]):  # columns of JSON, and of structs
        rows = [{"messages": [ASK, answer("Red.")], "tools": form} for form in forms]
        data = Dataset.from_list(rows, on_mixed_types="use_json")
        made = tokenise(data, tokenizer, arguments(tmp_path, max_length=None, assistant_only_loss=True))
        heads = [tokenizer.decode(row["input_ids"]).partition("<user>")[0] for row in made]
        assert heads == [json.dumps(tool) if form else "" for form in forms]


# any conversation, against texts that are put together here


class Turn(NamedTuple):
    """An answer: its message, and what it means."""

    message: dict[str, Any]
    thought: str
    content: str
    city: str | None = None  # of its tool call
    has_loss: bool = True


@st.composite
def conversations(draw) -> list[Any]:
    """Texts of a user or a tool as a message, answers as a Turn."""
    numbers = iter(range(1000, 2000))

    def words() -> str:
        return f"{draw(st.sampled_from(['fish', 'red', 'Ünï', '語', 'assistant']))} {next(numbers)} hums"

    def turn(city: str | None) -> Turn:
        thought = ""
        content = "" if city is not None and draw(st.booleans()) else words()
        where = draw(st.sampled_from(["none", "none", "reasoning_content", "reasoning", "thinking", "inline", "both"]))
        message = answer(content)
        if where != "none":
            thought = words()
        if where in ("inline", "both"):
            message["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
        if where == "both":
            message["thinking"] = thought
        if where in ("reasoning_content", "reasoning", "thinking"):
            message[where] = thought
        if city is not None:
            arguments = {"city": city}
            message["tool_calls"] = call(draw(st.sampled_from([arguments, json.dumps(arguments, ensure_ascii=False)])))
        has_loss = draw(st.integers(0, 3)) > 0
        if not has_loss:
            message["weight"] = 0
        return Turn(message, thought, content, city, has_loss)

    found = []
    for _ in range(draw(st.integers(1, 3))):
        asked = words() + draw(st.sampled_from(["", "", f" {EMPTY}why?", " </think> is a tag"]))
        found.append({"role": "user", "content": asked})
        if draw(st.integers(0, 2)) == 0:
            found += [turn(words()), {"role": "tool", "content": f"{EMPTY}{words()}"}]
        found.append(turn(None))
    return found


def expected(conversation: list[Any], family: Family, thinking: str, full: bool) -> Iterator[tuple[str, bool]]:
    """Pieces of the text, each with a loss or without one."""
    questions = [at for at, turn in enumerate(conversation) if not isinstance(turn, Turn) and turn["role"] == "user"]
    for at, turn in enumerate(conversation):
        if not isinstance(turn, Turn):
            yield f"<{turn['role']}>{turn['content']}{END}", full
            continue
        yield "<assistant>", full
        is_earlier = at < questions[-1]
        thought = turn.thought
        if thinking == "drop" or (thinking == "last" and is_earlier):
            thought = ""
        block = family.opened + thought + family.closed if thought else family.empty
        if is_earlier and family.earlier is not None and not (thinking == "keep" and family.switch):
            block = family.earlier
            thought = ""
        has_loss = turn.has_loss
        yield block, has_loss and (bool(thought) or thinking == "keep")
        calls = "" if turn.city is None else f"<call>look_up<city>{turn.city}"
        yield turn.content + calls + END, has_loss


def characters(parts: Any) -> list[tuple[str, bool]]:
    return [(letter, bool(has_loss)) for text, has_loss in parts for letter in text if not letter.isspace()]


def mark(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.level == "error"}


@pytest.mark.parametrize("examples", [10, pytest.param(400, marks=pytest.mark.grid)])
def test_any_conversation_has_the_tokens_and_losses_that_are_meant(tmp_path, examples):
    tokenizers = {name: tokenizer_of(template_of(family)) for name, family in FAMILIES.items()}

    @settings(max_examples=examples, phases=[Phase.generate], deadline=None)
    @given(
        st.sampled_from([*FAMILIES]),
        st.sampled_from(["keep", "last", "drop", "mask_empty"]),
        st.sampled_from(["template", "turn", "full"]),
        st.lists(conversations(), min_size=1, max_size=4),
    )
    def holds_for(name, thinking, how, drawn):
        rows = []
        for conversation in drawn:
            rows.append([turn.message if isinstance(turn, Turn) else turn for turn in conversation])
        data = Dataset.from_list([{"messages": row} for row in rows], on_mixed_types="use_json")
        args = arguments(tmp_path, max_length=None, assistant_only_loss=how != "full")
        ours = RowKeys("turn" if how == "turn" else None, thinking=thinking)
        try:
            made = tokenise(data, tokenizers[name], args, ours)
        except (
            Refusal
        ) as refusal:  # earlier thoughts before a tool's result are written otherwise once a question follows
            assert refusal.codes == ["ZR892"] and FAMILIES[name].earlier is not None, str(refusal)
            assert how == "turn" or any("weight" in turn for row in rows for turn in row)
            return
        found, _ = as_written.compared_as_written(data, made, tokenizers[name], args, "train", ours)
        assert mark(found) == set(), [str(finding) for finding in found]
        for conversation, row in zip(drawn, made, strict=True):
            parts = expected(conversation, FAMILIES[name], thinking, how == "full")
            assert characters(decoded_parts(row, tokenizers[name])) == characters(parts)

    holds_for()
