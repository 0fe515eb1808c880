"""Forms of rows: what the columns of a data set are, and how a row becomes what TRL takes.

What TRL takes by itself (prompt and completion, messages, texts, token ids) stays as it is. Other conversations become
`messages`; a question and its answer become a prompt and a completion, or messages, of one turn each.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.config.recipe import Settings
from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import library_error_as_finding, refusal

Rows = Dataset | IterableDataset

ALPACA_COLUMNS = ("instruction", "input", "output")
tables = partial(package_yaml, __package__, "forms.yaml")


class Form(NamedTuple):
    """What the columns are, in words, and how a row is converted; None where TRL takes it as it is."""

    description: str
    convert: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    chat: bool = False  # turns, which a chat template writes


def alpaca_prompt(instruction: str, input: str = "") -> str:
    """Alpaca's prompt, with or without input. The answer follows directly."""
    return tables()["alpaca"]["with_input" if input else "without_input"].format(instruction=instruction, input=input)


def alpaca_row(row: dict[str, Any]) -> dict[str, str]:
    """An Alpaca row as TRL's prompt and completion; TRL appends the end-of-text token, which is supervised. Raises
    TypeError where a column is not text: `str.format` would write the word None."""
    for name in ALPACA_COLUMNS:
        if not isinstance(row[name], str) and (name != "input" or row[name] is not None):
            raise TypeError(f"{name} is {row[name]!r}, not text")
    return {"prompt": alpaca_prompt(row["instruction"], row["input"] or ""), "completion": row["output"]}


def alpaca_turns(row: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """An Alpaca row as a conversation: Alpaca's prompt, whole, is the user's turn. Raises TypeError."""
    turns = zip(("user", "assistant"), alpaca_row(row).values(), strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def recognise(first: Mapping[str, Any], settings: Settings, dataset_format: str | None) -> Form | None:
    """The form of rows whose first is `first`; None where the recipe trains on nothing that is there."""
    if dataset_format in ("alpaca", "alpaca_chat"):
        chat, description = dataset_format == "alpaca_chat", "instruction, input and output, in Alpaca's prompt"
        form = Form(f"{description}, as turns", alpaca_turns, chat=True) if chat else Form(description, alpaca_row)
        return form if first.keys() >= {*ALPACA_COLUMNS} else None
    if (settings.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return Form("input_ids, as they are") if "input_ids" in first else None
    if dataset_format != "chat" and {"prompt", "completion"} <= first.keys():
        chat = isinstance(first["prompt"], list)
        return Form(f"prompt and completion, as {'turns' if chat else 'text'}", chat=chat)
    conversations = [name for name in tables()["conversations"] if _is_conversation(first.get(name))]
    if conversations:
        return _conversation(conversations[0], first)
    if dataset_format != "chat":
        plain = ("input_ids", settings.dataset_text_field)
        if found := next((name for name in plain if name in first), None):
            return Form(f"{found}, as {'it is' if found == settings.dataset_text_field else 'they are'}")
    return _pair({name for name, value in first.items() if isinstance(value, str | None)}, first, settings)


def convert(rows: Rows, form: Form, split: str = "the data") -> Rows:
    """The rows as TRL takes them; other columns are dropped. Raises Refusal."""
    if form.convert is None:
        return rows
    with library_error_as_finding(f"reading the rows of {split}"):
        columns = rows.column_names or list(next(iter(rows)))
        removed = [name for name in columns if not form.chat or name not in tables()["kept"]]
        return rows.map(partial(_numbered, form.convert), with_indices=True, remove_columns=removed)


def rename(rows: Rows, columns: Mapping[str, str] | None) -> Rows:
    """`columns`: {the name that is read: the name in the data}. A column that has the new name already is dropped."""
    if not columns:
        return rows
    taken = [new for new, old in columns.items() if new in (rows.column_names or ()) and new not in columns.values()]
    return rows.remove_columns(taken).rename_columns({old: new for new, old in columns.items() if old != new})


def _numbered(convert: Callable, row: dict[str, Any], number: int) -> dict[str, Any]:
    try:
        return convert(row)
    except TypeError as error:
        raise TypeError(f"row {number}: {error}") from None


def _is_conversation(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and all(_named(key, first) for key in ("speaker", "text"))


def _named(key: str, columns: Mapping[str, Any], kind: type = object) -> str | None:
    """The first of forms.yaml's names under `key` that is there, with a value of this kind."""
    return next((name for name in tables()[key] if name in columns and isinstance(columns[name], kind)), None)


def _conversation(column: str, first: Mapping[str, Any]) -> Form:
    turns, roles, system = first[column], tables()["roles"], _named("system", first, str)
    speaker, text = (_named(key, turns[0]) for key in ("speaker", "text"))
    others = {str(turn.get(speaker)): None for turn in turns if roles.get(turn.get(speaker)) != turn.get(speaker)}
    known = [f"{name} is {roles[name]}" for name in others if name in roles]
    if (column, speaker, text, system, known) == ("messages", "role", "content", None, []):
        return Form("messages, as they are", chat=True)
    description = f"{column} with {speaker} and {text}, as messages"
    description += f" ({', '.join(known)})" if known else ""
    description += f"; {system} goes before them" if system else ""
    return Form(description, partial(_as_messages, column, speaker, text, system), chat=True)


def _as_messages(column: str, speaker: str, text: str, system: str | None, row: dict[str, Any]) -> dict[str, Any]:
    roles, messages = tables()["roles"], []
    if not isinstance(row[column], list) or not row[column]:
        raise TypeError(f"{column} is {row[column]!r}, not a list of messages")
    for message in row[column]:
        name = message.get(speaker)
        if name not in roles:
            raise TypeError(f"{speaker} is {name!r} in {column}; known are {', '.join(roles)}")
        messages.append({"role": roles[name], "content": message.get(text)})
    before = row.get(system) if system and messages[0]["role"] != "system" else None
    return {"messages": [{"role": "system", "content": before}] * bool(before) + messages}


def _pair(columns: set[str], first: Mapping[str, Any], settings: Settings) -> Form | None:
    """None too where two columns could be the question, or the answer: the recipe's `columns` says which."""
    named = tables()
    questions, answers = ([name for name in named[key] if name in columns] for key in ("questions", "answers"))
    contexts = [name for name in named["contexts"] if name in columns and questions not in ([name], [])]
    questions = [name for name in questions if name not in contexts]
    if len(questions) != 1 or len(answers) != 1 or len(contexts) > 1:
        return None
    system, history = _named("system", first, str), "history" if isinstance(first.get("history"), list) else None
    user_columns, before = questions + contexts, [name for name in (system, history) if name]
    description = f"{' and '.join(user_columns)} as the user's turn, {answers[0]} as the assistant's"
    description += f"; {' and '.join(before)} before them" if before else ""
    pair = partial(_as_turns, tuple(user_columns), answers[0], system, history, bool(settings.assistant_only_loss))
    return Form(description, pair, chat=True)


def _as_turns(
    questions: tuple[str, ...], answer: str, system: str | None, history: str | None, whole: bool, row: dict[str, Any]
) -> dict[str, Any]:
    """`whole`: as one list of messages, whose assistant's turns all carry loss."""
    for name in (questions[0], answer):
        if not isinstance(row[name], str):
            raise TypeError(f"{name} is {row[name]!r}, not text")
    earlier = [pair for pair in (row[history] or [])] if history else []
    turns = [turn for pair in earlier for turn in zip(("user", "assistant"), pair, strict=True)]
    turns = ([("system", row[system])] if system and row[system] else []) + turns
    turns.append(("user", "\n".join(row[name] for name in questions if row[name])))
    prompt, completion = (
        [{"role": role, "content": text} for role, text in part] for part in (turns, [("assistant", row[answer])])
    )
    return {"messages": prompt + completion} if whole else {"prompt": prompt, "completion": completion}


# Masks of the assistant's tokens for chat templates without `{% generation %}`, by rendering prefixes. A turn begins
# where the conversation before it ends, rendered with the generation prompt. It ends with the first special token that
# the template writes after an answer.

ANSWER = "zero recipes"  # a text that no template changes


def mask_by(rows: Rows, tokenizer: PreTrainedTokenizerBase, training_args) -> str | None:
    """How the assistant's tokens are found here: "turn" or "answer"; None where TRL does it, or none is needed."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    named, template = getattr(training_args, "assistant_mask", None), tokenizer.chat_template
    columns = rows.column_names or list(next(iter(rows)))
    if not training_args.assistant_only_loss or not template or named == "template" or "input_ids" in columns:
        return None
    if named is not None or has_generation_markers(template):
        return named
    try:
        get_training_chat_template(tokenizer)
    except Exception:  # ValueError where TRL has no version of its own, others from a template that takes no tool calls
        return "turn"
    return None


def masked(rows: Rows, tokenizer: PreTrainedTokenizerBase, training_args, workers: int | None = None) -> Rows:
    """The rows with input_ids and assistant_masks where the masks are made here; else as they are. Raises Refusal."""
    how = mask_by(rows, tokenizer, training_args)
    if how is None:
        return rows
    only = training_args.completion_only_loss is not False
    with library_error_as_finding("masking all but the assistant's tokens"):
        keywords = {"end": _end_of_turn(tokenizer), "how": how, "only_completion": only, "tokenizer": tokenizer}
        several = {"fn_kwargs": keywords} | ({} if workers is None else {"num_proc": workers})
        columns = rows.column_names or list(next(iter(rows)))
        return rows.map(_masked, with_indices=True, remove_columns=columns, **several)


def _masked(row: dict[str, Any], number: int, end: str, how: str, only_completion: bool, tokenizer) -> dict[str, Any]:
    prompt = row.get("prompt") or []
    messages = prompt + row["completion"] if prompt else row["messages"]
    tools = row.get("tools")
    options = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    options |= row.get("chat_template_kwargs") or {}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    spans = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or (only_completion and at < len(prompt)):
            continue
        before = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True, **options)
        if not text.startswith(before):
            raise refusal("ZR892", row=number, turn=at)
        stop = text.find(end, len(before))
        stop = len(text) if stop < 0 else stop + len(end)
        start = len(before)
        if how == "answer" and isinstance(message.get("content"), str):
            start = max(start, text.find(message["content"].strip(), start, stop))
        if how == "turn":  # up to the next turn: line breaks that the template writes
            stop = len(text) - len(text[stop:].lstrip())
        spans.append((start, stop))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [int(any(a < last and first < b for a, b in spans)) for first, last in tokens["offset_mapping"]]
    return {"input_ids": tokens["input_ids"], "assistant_masks": inside}


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes after an answer, up to the first special token."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(ANSWER)[2]
    special = [token for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if token in tail]
    if not special:
        raise refusal("ZR891", tail=tail)
    return min(special, key=tail.index)
