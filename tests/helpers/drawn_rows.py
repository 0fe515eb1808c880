"""Rows of every form that a data set may have, drawn by hypothesis, with what they mean."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from zero_recipes.data.forms import alpaca_prompt

END = "<|endoftext|>"
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t['name'] }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
TOOLS = [{"name": "look_up"}]


@dataclass
class Turn:
    role: str
    text: str
    weight: int | bool | None = None  # as the file has it; None for no weight


@dataclass
class Example:
    """A row as its file has it, and the turns or texts that it means. A row of weight 0 means none."""

    row: dict[str, Any]
    turns: list[Turn] | None = None
    is_pair: bool = False  # the last turn alone has a loss
    texts: tuple[str, str] | None = None  # prompt and completion
    tools: bool = False
    left_out: bool = False
    keys: dict[str, Any] = field(default_factory=dict)  # of the recipe


PIECES = ["fish", "Say", "red.", "<user>", "assistant", "2101", "\n", "  ", "Ünï", "語", "👩‍👧", "null"]
PLAIN = st.lists(st.sampled_from(PIECES), max_size=5).map(" ".join)
ANSWER = PLAIN.filter(str.strip)
SPOKEN = st.lists(st.sampled_from([*PIECES, END]), max_size=5).map(" ".join)
WEIGHT = st.sampled_from([None, None, 1, True, 0])
SPELLINGS = {"user": ["user", "human"], "assistant": ["assistant", "gpt", "Assistant"], "system": ["system"]}
SYSTEM = st.sampled_from([None, "Be kind.", "You are a pirate."])


@st.composite
def chat_turns(draw, weights: bool) -> list[Turn]:
    """Any order of roles, with one answer at least that has a text and a loss."""
    turns = []
    for role in draw(st.lists(st.sampled_from(["user", "assistant", "system"]), max_size=4)):
        weight = draw(WEIGHT) if weights and role == "assistant" else None
        turns.append(Turn(role, draw(SPOKEN), weight))
    answer = Turn("assistant", draw(ANSWER), draw(st.sampled_from([None, 1])) if weights else None)
    turns.insert(draw(st.integers(0, len(turns))), answer)
    return turns


def written_turn(draw, turn: Turn, names: tuple[str, str], parts: bool) -> dict[str, Any]:
    speaker, text = names
    content = turn.text
    if parts and draw(st.booleans()):
        middle = draw(st.integers(0, len(content)))
        content = [{"type": "text", "text": content[:middle]}, {"type": "text", "text": content[middle:]}]
    found = {speaker: draw(st.sampled_from(SPELLINGS[turn.role])), text: content}
    if turn.weight is not None:
        found["weight"] = turn.weight
    return found


@st.composite
def conversations(draw) -> list[Example]:
    column = draw(st.sampled_from(["messages", "conversations", "dialogue"]))
    names = draw(st.sampled_from([("role", "content"), ("from", "value")]))
    system_column = draw(st.sampled_from([None, "system", "system_prompt"]))
    has_weights = draw(st.booleans())
    has_parts = draw(st.booleans())
    row_weights = draw(st.booleans())
    examples = []
    for _ in range(draw(st.integers(1, 4))):
        turns = draw(chat_turns(has_weights))
        row = {column: [written_turn(draw, turn, names, has_parts) for turn in turns], "lang": "en"}
        example = Example(row, turns)
        if system_column is not None:
            row[system_column] = draw(SYSTEM)
            if turns[0].role == "system":
                row[system_column] = None
            elif row[system_column] is not None:
                example.turns = [Turn("system", row[system_column]), *turns]
        if draw(st.booleans()):
            row["tools"] = TOOLS
            example.tools = True
        if row_weights and examples:
            row["weight"] = draw(st.sampled_from([None, 1, 0]))
            example.left_out = row["weight"] == 0
        examples.append(example)
    return examples


@st.composite
def pairs(draw) -> list[Example]:
    """A question and its answer, with context, history and system where they are not null; columns may be renamed."""
    names = draw(st.sampled_from([("instruction", "output"), ("question", "answer"), ("query", "response")]))
    renamed = draw(st.sampled_from([{}, dict(zip(names, ("ask", "reply"), strict=True))]))
    examples = []
    for _ in range(draw(st.integers(1, 4))):
        question, answer = draw(PLAIN), draw(ANSWER)
        context = draw(st.sampled_from([None, "", "The cave."]))
        history = draw(st.sampled_from([None, [], [["Who?", "A fish."]]]))
        system = draw(SYSTEM)
        row = {"input": context, "history": history, "system": system}
        row |= {renamed.get(names[0], names[0]): question, renamed.get(names[1], names[1]): answer}
        turns = [] if system is None else [Turn("system", system)]
        for asked, answered in history or []:
            turns += [Turn("user", asked), Turn("assistant", answered)]
        turns.append(Turn("user", f"{question}\n{context}" if context else question))
        example = Example(row, [*turns, Turn("assistant", answer)], is_pair=True, keys={"columns": renamed or None})
        examples.append(example)
    return examples


@st.composite
def alpaca(draw) -> list[Example]:
    examples = []
    for _ in range(draw(st.integers(1, 4))):
        row = {"instruction": draw(PLAIN), "input": draw(st.sampled_from([None, "", "Now."])), "output": draw(ANSWER)}
        texts = (alpaca_prompt(row["instruction"], row["input"] or ""), row["output"])
        examples.append(Example(row | {"lang": "en"}, texts=texts, keys={"dataset_format": "alpaca"}))
    return examples


@st.composite
def prompts_and_completions(draw) -> list[Example]:
    examples = []
    as_turns = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        prompt, completion = draw(PLAIN), draw(ANSWER)
        if as_turns:
            turns = [Turn("user", prompt), Turn("assistant", completion)]
            row = {
                "prompt": [written_turn(draw, turns[0], ("role", "content"), True)],
                "completion": [written_turn(draw, turns[1], ("role", "content"), True)],
            }
            examples.append(Example(row, turns, is_pair=True))
        else:
            row = {"prompt": prompt, "completion": completion, "score": 0.5}
            examples.append(Example(row, texts=(prompt, completion)))
    return examples


@st.composite
def texts(draw) -> list[Example]:
    found = draw(st.lists(ANSWER, min_size=1, max_size=4))
    return [Example({"text": text, "id": number}, texts=("", text)) for number, text in enumerate(found)]
