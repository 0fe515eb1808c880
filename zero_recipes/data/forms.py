"""What the columns of a data set are, and how a row becomes what TRL takes.

The columns decide the form, by their types over all rows. Each row is then converted by itself: its own nulls, role
names and weights count, and a row that does not fit is named. TRL 1.16 looks at the first row only.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Json, List, Value

from zero_recipes.config.settings import Settings
from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.data.audit import TOKEN_COLUMNS, skips_preparation
from zero_recipes.engine import huggingface
from zero_recipes.engine.faults import json_texts

Rows = Dataset | IterableDataset
Row = dict[str, Any]

ALPACA_COLUMNS = ("instruction", "input", "output")
INFORMATIVE_ROWS = 1000  # at most, that are read to know what a list holds
NULLS_AT_ONCE = 10_000  # rows of a data set, looked at for nulls
tables = partial(package_yaml, __package__, "forms.yaml")
# JSON keeps each turn's own keys. Columns of Arrow's structs would give every turn the keys of all, as nulls.
TURNS = List(Json())
# Column of conversations that were a prompt and a completion: how many of the messages are the prompt's. Where only
# completions have a loss, those have none. Beside them stand conversations that have a loss as a whole (0).
PROMPT_TURNS = "prompt_turns"


class Form(NamedTuple):
    """What the columns of a data set are taken for, and how a row of it becomes what TRL takes."""

    description: str
    used: frozenset[str]  # columns of the data
    convert: Callable[[Row], Row] | None = None  # None where TRL takes a row as it is
    turns: tuple[str, ...] = ()  # columns of messages that `convert` makes, which a chat template writes
    example: Row | None = None  # the first row, converted
    texts: tuple[str, ...] = ()  # columns of texts that `convert` makes
    required: tuple[str, ...] = ()  # columns of the data without which a row has not this form
    is_made_alike: bool = False  # to be one of several forms: its conversations have PROMPT_TURNS


TOKEN_IDS = Form("input_ids, as they are", frozenset(TOKEN_COLUMNS), required=("input_ids",))


@cache
def code_digest() -> str:
    """Hash of all code that makes rows.

    The datasets library keeps what `map` has made, and knows a function by its name alone: without this among the
    function's arguments, rows that an earlier version has converted would train in place of today's.
    """
    digest = hashlib.sha256(Path(huggingface.__file__).read_bytes())
    digest.update(Path(json_texts.__file__).read_bytes())
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".yaml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class RowError(TypeError):
    """Raised for a row that does not fit the form of its data set."""

    row: int | None = None


@contextlib.contextmanager
def row_errors_as_findings(split: str) -> Iterator[None]:
    """Turn a RowError that is raised within it into a Refusal that names row and split."""
    try:
        yield
    except RowError as error:
        raise refusal("ZR524", row=error.row, split=split, fault=error) from None


# what a column holds


def column_kinds(rows: Rows) -> dict[str, str]:
    """What each column holds, by name: "text", "null", "turns", "list", or the datasets library's name of another type.

    Of a stream by the types that it declares, else by its first rows.
    """
    features = rows.features
    if features is None:
        first_rows = list(rows.take(INFORMATIVE_ROWS))
        features = Dataset.from_list(first_rows, on_mixed_types="use_json").features
    kinds = {}
    for name, feature in features.items():
        if not isinstance(feature, Value):
            kinds[name] = _kind_of_nested(rows, name, feature)
        elif feature.dtype in ("string", "large_string"):
            kinds[name] = "text"
        else:
            kinds[name] = feature.dtype
    for name in _columns_of_encoded_turns(rows, [name for name, kind in kinds.items() if kind == "text"]):
        kinds[name] = "turns"
    return kinds


def _columns_of_encoded_turns(rows: Rows, columns: list[str]) -> list[str]:
    """Those of the columns of text that hold messages as JSON.

    Of a column that is named as a conversation's one row is enough; in others every row must, for a text may be a list.
    """
    first = next(iter(rows.take(1)), {})
    candidates = []
    for name in columns:
        is_list = isinstance(first.get(name), str) and first[name].lstrip().startswith("[")
        if is_list or name in tables()["conversations"]:
            candidates.append(name)
    if not candidates:
        return []
    encoded = []
    values = rows.select_columns(candidates).take(INFORMATIVE_ROWS)
    are_turns = [{name: encoded_turns(row[name]) is not None for name in candidates} for row in values]
    for name in candidates:
        enough = any if name in tables()["conversations"] else all
        if enough(row[name] for row in are_turns):
            encoded.append(name)
    return encoded


def encoded_turns(value: Any) -> list[Any] | None:
    """The messages that a text holds as JSON; None where it holds none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        turns = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return turns if any(map(_is_turn, turns)) else None


def column_like_turns(rows: Rows, kinds: Mapping[str, str]) -> str | None:
    """The name of a column of text that looks like a list of messages, but is no JSON; None without one."""
    first = next(iter(rows.take(1)), {})
    for name in tables()["conversations"]:
        value = first.get(name)
        if kinds.get(name) == "text" and isinstance(value, str) and "".join(value.split()).startswith("[{"):
            return name
    return None


def _kind_of_nested(rows: Rows, name: str, feature: Any) -> str:
    """The values say, not the type."""
    kinds = {_kind_of_value(row.get(name), feature) for row in rows.take(INFORMATIVE_ROWS)}
    for kind in ("turns", "list", "text", type(feature).__name__):
        if kind in kinds:
            return kind
    return "null"


def _kind_of_value(value: Any, feature: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "turns" if any(map(_is_turn, value)) else "list"
    return "text" if isinstance(value, str) else type(feature).__name__


def _is_turn(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return not value.keys().isdisjoint(tables()["speaker"]) and not value.keys().isdisjoint(tables()["text"])


# which form it is


def recognise(kinds: Mapping[str, str], settings: Settings, dataset_format: str | None) -> Form | None:
    """The form of a data set by its columns; None where the recipe trains on nothing that is there.

    `kinds`: of `column_kinds`.
    """
    if dataset_format in ("alpaca", "alpaca_chat"):
        return _alpaca(kinds, dataset_format)
    if skips_preparation(settings):
        return TOKEN_IDS if "input_ids" in kinds else None
    only_chat = dataset_format == "chat"
    text_field = settings.dataset_text_field
    if not only_chat and "prompt" in kinds and "completion" in kinds:
        return _prompt_and_completion(kinds)
    for name in tables()["conversations"]:
        if kinds.get(name) == "turns":
            return _conversation(name, kinds)
    if not only_chat and kinds.get("input_ids", "null") != "null":
        return TOKEN_IDS
    if not only_chat and kinds.get(text_field) == "turns":
        return _conversation(text_field, kinds)
    if not only_chat and text_field in kinds:
        return _texts(f"{text_field}, as it is", text_field)
    return _pair(kinds, bool(settings.assistant_only_loss))


def _alpaca(kinds: Mapping[str, str], dataset_format: str) -> Form | None:
    used = frozenset(ALPACA_COLUMNS)
    if not used <= kinds.keys():
        return None
    description = "instruction, input and output, in Alpaca's prompt"
    required = ("instruction", "output")
    if dataset_format == "alpaca":
        return Form(description, used, alpaca_row, texts=("prompt", "completion"), required=required)
    return Form(f"{description}, as turns", used, alpaca_turns, ("messages",), required=required)


def _texts(description: str, *names: str) -> Form:
    def convert(row: Row) -> Row:
        return {name: _text(row, name) for name in names}

    return Form(description, frozenset(names), convert, texts=names, required=names)


def _prompt_and_completion(kinds: Mapping[str, str]) -> Form:
    names = ("prompt", "completion")
    if {"turns", "list"}.isdisjoint([kinds["prompt"], kinds["completion"]]):
        return _texts("prompt and completion, as text", *names)

    def convert(row: Row) -> Row:
        return {name: turns_of(row, name) for name in names}

    return Form("prompt and completion, as turns", frozenset(names), convert, names, required=names)


def _conversation(column: str, kinds: Mapping[str, str]) -> Form:
    system = _system_column(kinds)
    description = "messages, as they are" if column == "messages" else f"{column}, as messages"
    if system:
        description += f"; {system} goes before them"

    def convert(row: Row) -> Row:
        messages = turns_of(row, column)
        before = _text_or_none(row, system)
        if before and messages[0]["role"] == "system":
            if messages[0]["content"] != before:
                raise RowError(f"has a system turn in {column}, and another text in {system}")
        elif before:
            messages = [{"role": "system", "content": before}, *messages]
        return {"messages": messages}

    used = frozenset([column, system]) - {None}
    return Form(description, used, convert, ("messages",), required=(column,))


def _pair(kinds: Mapping[str, str], whole: bool) -> Form | None:
    """A question and its answer. None where two columns could be one of them: the recipe's `columns` says which.

    `whole`: as one list of messages.
    """
    questions = _text_columns(kinds, "questions")
    answers = _text_columns(kinds, "answers")
    contexts = [name for name in _text_columns(kinds, "contexts") if questions != [name]]
    questions = [name for name in questions if name not in contexts]
    if len(questions) != 1 or len(answers) != 1 or len(contexts) > 1:
        return None
    question = questions[0]
    answer = answers[0]
    system = _system_column(kinds)
    history = "history" if kinds.get("history") in ("list", "turns") else None
    user_columns = [question, *contexts]
    before = [name for name in (system, history) if name]
    description = f"{' and '.join(user_columns)} as the user's turn, {answer} as the assistant's"
    if before:
        description += f"; {' and '.join(before)} before them"

    def convert(row: Row) -> Row:
        prompt = []
        instructions = _text_or_none(row, system)
        if instructions:
            prompt.append({"role": "system", "content": instructions})
        if history and row[history]:
            prompt += _earlier_turns(row[history])
        asked = [_text(row, question)]
        for name in contexts:
            context = _text_or_none(row, name)
            if context:
                asked.append(context)
        prompt.append({"role": "user", "content": "\n".join(asked)})
        completion = [{"role": "assistant", "content": _text(row, answer)}]
        if whole:
            return {"messages": prompt + completion}
        return {"prompt": prompt, "completion": completion}

    made = ("messages",) if whole else ("prompt", "completion")
    return Form(description, frozenset(user_columns + before + [answer]), convert, made, required=(question, answer))


def _text_columns(kinds: Mapping[str, str], key: str) -> list[str]:
    """The columns of texts among forms.yaml's names under `key`."""
    return [name for name in tables()[key] if kinds.get(name) == "text"]


def _system_column(kinds: Mapping[str, str]) -> str | None:
    return next(iter(_text_columns(kinds, "system")), None)


# several forms become one


def of_mixed_rows(form: Form, rows: Rows, kinds: Mapping[str, str], settings: Settings, split: str) -> Form:
    """The form of a data set some of whose rows lack what `form` reads, and have another form's columns instead.

    `form` itself where all rows have it, or no other form fits. Raises Refusal where the forms cannot become one.
    """
    forms = [form]
    left = dict(kinds)
    read = list(form.required)
    while any_row_lacks(rows, read):
        left = {name: kind for name, kind in left.items() if name not in forms[-1].required}
        other = recognise(left, settings, None)
        if other is None:
            break
        forms.append(other)
        read += other.required
    if len(forms) == 1:
        return form
    alike = made_alike(forms, [f"rows of {split}"] * len(forms))
    # no sets in here: the datasets library hashes what `convert` holds, and their order changes from run to run
    known = [(one.required, one.convert, one.description) for one in alike]

    def convert(row: Row) -> Row:
        begun = [one for one in known if any(row.get(name) is not None for name in one[0])]
        if len(begun) > 1:
            raise RowError(f"has values for two forms: {begun[0][2]}, and {begun[1][2]}")
        _, convert_row, _ = (begun or known)[0]
        return convert_row(row)

    description = ", or ".join(one.description for one in alike)
    used = frozenset().union(*(one.used for one in alike))
    return alike[0]._replace(description=description, used=used, convert=convert)


def any_row_lacks(rows: Rows, columns: list[str]) -> bool:
    """Whether any row has nulls in all of the columns. Of a stream the first rows are read."""
    if not isinstance(rows, Dataset):
        return any(all(row.get(name) is None for name in columns) for row in rows.take(INFORMATIVE_ROWS))
    for table in rows.select_columns(columns).with_format("arrow").iter(NULLS_AT_ONCE):
        lacks = table.column(columns[0]).is_null()
        for name in columns[1:]:
            lacks = pc.and_(lacks, table.column(name).is_null())
        if pc.any(lacks).as_py():
            return True
    return False


def made_alike(forms: list[Form], places: list[str]) -> list[Form]:
    """The same forms, all of which make the same columns: rows of one data set may have each of them.

    Conversations, and questions with their answers, become `messages`. Texts become a prompt, which is empty, and a
    completion. What has a loss stays what it is in a data set of one form. Raises Refusal for other mixtures.
    `places`: where each form is, in words.
    """
    if len({(form.turns, form.texts) for form in forms}) == 1:
        return forms
    has_turns = any(form.turns for form in forms)
    for form in forms:
        is_text_alone = len(form.texts) == 1
        if form.convert is None or (has_turns and is_text_alone):
            listed = "\n    ".join(f"{where}: {one.description}" for where, one in zip(places, forms, strict=True))
            raise refusal("ZR588", odd=form.description, listed=listed)
    return [_in_messages(form) if has_turns else _as_completion(form) for form in forms]


def _in_messages(form: Form) -> Form:
    convert_row = form.convert

    def convert(row: Row) -> Row:
        return _one_conversation(convert_row(row))

    description = form.description
    if not form.turns:
        description = f"{description}, as the user's and the assistant's turn"
    return form._replace(description=description, convert=convert, turns=("messages",), texts=(), is_made_alike=True)


def _one_conversation(row: Row) -> Row:
    """A converted row as messages."""
    if "messages" in row:
        return {"messages": row["messages"], PROMPT_TURNS: 0}
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return {"messages": prompt + completion, PROMPT_TURNS: len(prompt)}


def _as_completion(form: Form) -> Form:
    convert_row = form.convert

    def convert(row: Row) -> Row:
        made = convert_row(row)
        if "completion" in made:
            return made
        (text,) = made.values()
        return {"prompt": "", "completion": text}

    return form._replace(convert=convert, texts=("prompt", "completion"))


def with_same_columns(parts: list[Rows]) -> list[Rows]:
    """The parts of a mixture, with the columns that chat templates read in all of them where one has any.

    As JSON, for their types may differ. A row without keywords has an empty mapping: TRL takes no null.
    """
    named = [name for name in tables()["kept"] if any(name in (part.column_names or ()) for part in parts)]
    types = [[(part.features or {}).get(name) for name in named] for part in parts]
    if not named or all(of_part == types[0] for of_part in types):
        return parts
    same = []
    for part in parts:
        features = None
        if part.features is not None:
            features = Features({**part.features, **dict.fromkeys(named, Json())})
        same.append(part.map(_with_columns, fn_kwargs={"named": named, "code": code_digest()}, features=features))
    return same


def _with_columns(row: Row, named: list[str], code: str) -> Row:
    """`code`: for the cache (`code_digest`)."""
    columns = {name: row.get(name) for name in named}
    if "chat_template_kwargs" in named:
        columns["chat_template_kwargs"] = columns["chat_template_kwargs"] or {}
    return columns


# one row


def alpaca_prompt(instruction: str, input: str = "") -> str:
    """Alpaca's prompt around an instruction and its input."""
    template = tables()["alpaca"]["with_input" if input else "without_input"]
    return template.format(instruction=instruction, input=input)


def alpaca_row(row: Row) -> dict[str, str]:
    """An Alpaca row as TRL's prompt and completion.

    Raises RowError where a column is not text: `str.format` would write None.
    """
    prompt = alpaca_prompt(_text(row, "instruction"), _text_or_none(row, "input") or "")
    return {"prompt": prompt, "completion": _text(row, "output")}


def alpaca_turns(row: Row) -> dict[str, list[dict[str, str]]]:
    """An Alpaca row as messages: Alpaca's prompt, whole, is the user's turn. Raises RowError."""
    texts = alpaca_row(row)
    user = {"role": "user", "content": texts["prompt"]}
    assistant = {"role": "assistant", "content": texts["completion"]}
    return {"messages": [user, assistant]}


def turns_of(row: Row, column: str) -> list[Row]:
    """The messages of one column of a row: role, content, the turn's other keys. Raises RowError.

    `weight: 0` says that a message has no loss; `silent_parts`, as [first, end, number of the part], which characters
    of its content have none.
    """
    turns = row[column]
    if isinstance(turns, str):
        turns = encoded_turns(turns)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"{column} is {row[column]!r}, not a list of messages")
    return [_message(turn, f"message {number} of {column}") for number, turn in enumerate(turns)]


def _message(turn: Any, place: str) -> Row:
    if not isinstance(turn, Mapping):
        raise RowError(f"{place} is {turn!r}, which has no role")
    speaker = _first_set(turn, "speaker")
    if speaker is None:
        raise RowError(f"{place} has no role")
    text = _first_set(turn, "text")
    message = {"role": _role(turn[speaker], place), "content": None}
    weight = _weight(turn, place)
    silent_parts = []
    if text is not None:
        message["content"], silent_parts = _content(turn[text], place, weight)
    elif not turn.get("tool_calls"):
        raise RowError(f"{place} ({message['role']}) has no content")
    consumed = {speaker, text, *tables()["weights"], *message}
    for name, value in turn.items():
        if name not in consumed and value is not None:
            message[name] = value
    if weight == 0:
        message["weight"] = 0
    elif silent_parts:
        message["silent_parts"] = silent_parts
    return message


def _first_set(turn: Mapping[str, Any], key: str) -> str | None:
    """The first of forms.yaml's names under `key` that this turn has a value for."""
    for name in tables()[key]:
        if turn.get(name) is not None:
            return name
    return None


def _role(name: Any, place: str) -> str:
    roles = tables()["roles"]
    role = roles.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"{place} has the unknown role {name!r}; known are {', '.join(roles)}")
    return role


def _content(value: Any, place: str, weight: int) -> tuple[str, list[list[int]]]:
    """(the text, or the texts of a list of parts joined, as APIs write it; the turn's `silent_parts`).

    `weight`: of the turn.
    """
    if isinstance(value, str):
        return value, []
    if not isinstance(value, list):
        raise RowError(f"the content of {place} is {value!r}, not text")
    content = ""
    silent_parts = []
    for number, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in tables()["text_parts"] or not isinstance(part.get("text"), str):
            raise RowError(f"{place} has a part of the type {kind!r}; only texts can be trained")
        first = len(content)
        content += part["text"]
        if _part_weight(part, f"part {number} of {place}", weight) == 0:
            silent_parts.append([first, len(content), number])
    return content, silent_parts


def _part_weight(part: Mapping[str, Any], place: str, weight: int) -> int:
    """1 for a loss, 0 for none. Raises RowError for keys of unknown meaning: they could say what is trained.

    `weight`: of its turn.
    """
    own = _weight(part, place)
    weights = tables()["weights"]
    if weight == 0 and own == 1 and any(part.get(name) is not None for name in weights):
        raise RowError(f"{place} has a loss, but its message has none")
    known = {"type", "text", *weights, *tables()["part_notes"]}
    for name, value in part.items():
        is_empty = value is None or value in ("", [], {})
        if name not in known and not is_empty:
            raise RowError(f"{place} has `{name}`, which zero-recipes does not read")
    return own


def _weight(values: Mapping[str, Any], place: str) -> int:
    """1 for a loss, 0 for none, of a turn or a row. Raises RowError for other values and for other projects' keys."""
    for name in tables()["other_weights"]:
        if values.get(name) is not None:
            raise RowError(f"{place} has `{name}`, which zero-recipes does not read")
    found = {}
    for name in tables()["weights"]:
        value = values.get(name)
        if value is None:
            continue
        if value not in (0, 1):
            raise RowError(f"`{name}` of {place} is {value!r}, not 0 or 1")
        found[name] = int(value)
    if len(set(found.values())) > 1:
        raise RowError(f"{place} has {' and '.join(found)}, which contradict each other")
    return min(found.values(), default=1)


def _earlier_turns(history: list[Any] | str) -> list[Row]:
    """`history`: pairs of a question and its answer, or messages."""
    history = encoded_turns(history) or history
    if isinstance(history[0], Mapping):
        return turns_of({"history": history}, "history")
    turns = []
    for pair in history:
        match pair:
            case [str(question), str(answer)]:
                turns.append({"role": "user", "content": question})
                turns.append({"role": "assistant", "content": answer})
            case _:
                raise RowError(f"history has {pair!r}, not a question and its answer")
    return turns


def _text(row: Row, name: str) -> str:
    if not isinstance(row[name], str):
        raise RowError(f"{name} is {row[name]!r}, not text")
    return row[name]


def _text_or_none(row: Row, name: str | None) -> str | None:
    if name is None or row.get(name) is None:
        return None
    return _text(row, name)


# all rows


def convert(rows: Rows, form: Form, split: str = "the data") -> Rows:
    """The rows as their form makes them, without the columns that it does not read. Raises Refusal, with the row."""
    columns = column_names(rows)
    with library_error_as_finding(f"reading the rows of {split}"), row_errors_as_findings(split):
        if form.convert is None:
            return rows.select_columns([name for name in columns if name in form.used])
        kept = [name for name in tables()["kept"] if form.turns and name in columns]
        features = None
        if form.turns and rows.features is not None:
            features = Features(dict.fromkeys(form.turns, TURNS))
            features.update({name: rows.features[name] for name in kept})
            if form.is_made_alike:
                features[PROMPT_TURNS] = Value("int64")
        removed = [name for name in columns if name not in kept]
        keywords = {"convert_row": form.convert, "code": code_digest()}
        return rows.map(_numbered, with_indices=True, fn_kwargs=keywords, remove_columns=removed, features=features)


def column_names(rows: Rows) -> list[str]:
    """The names of the rows' columns. A stream may not declare them: its first row has them."""
    return rows.column_names or list(next(iter(rows)))


def leave_out_weightless(rows: Rows, kinds: Mapping[str, str], split: str = "the data") -> Rows:
    """The rows without those of `weight: 0`. Raises Refusal for other values, with the row."""
    names = tables()["weights"] + tables()["other_weights"]
    if all(kinds.get(name, "null") == "null" for name in names):
        return rows
    with library_error_as_finding(f"reading the rows of {split}"), row_errors_as_findings(split):
        keywords = {"convert_row": _has_weight, "code": code_digest()}
        return rows.filter(_numbered, with_indices=True, fn_kwargs=keywords)


def _has_weight(row: Row) -> bool:
    return _weight(row, "the row") == 1


def _numbered(row: Row, number: int, convert_row: Callable[[Row], Any], code: str) -> Any:
    """`convert_row` of the row; its errors know the row's number. `code`: for the cache (`code_digest`)."""
    try:
        return convert_row(row)
    except RowError as error:
        error.row = number
        raise


def unread(kinds: Mapping[str, str], form: Form) -> list[str]:
    """The names of columns that have values and that nothing reads."""
    read = form.used.union(tables()["weights"])
    if form.turns:
        read |= set(tables()["kept"])
    return [name for name, kind in kinds.items() if kind != "null" and name not in read]


MESSAGES = "messages."  # before the key of a message, in `columns`


def rename(rows: Rows, columns: Mapping[str, str] | None) -> Rows:
    """The rows under the column names that the recipe's `columns` gives them.

    `columns`: {new name: the name in the data}. A column that has the new name already is dropped.
    {"messages.content": "utterance"} names a key of each message, in whatever column the conversation is.
    """
    if not columns:
        return rows
    taken = []
    new_names = {}
    of_messages = {new.removeprefix(MESSAGES): old for new, old in columns.items() if new.startswith(MESSAGES)}
    for new, old in columns.items():
        if new.startswith(MESSAGES):
            continue
        if new in (rows.column_names or ()) and new not in columns.values():
            taken.append(new)
        if old != new:
            new_names[old] = new
    renamed = rows.remove_columns(taken).rename_columns(new_names)
    return _rename_in_messages(renamed, of_messages) if of_messages else renamed


def _rename_in_messages(rows: Rows, names: Mapping[str, str]) -> Rows:
    """`names`: {new key: the key in the data}. Other keys that would be taken for the new ones are dropped."""
    columns = [name for name in tables()["conversations"] if name in column_names(rows)]
    if not columns:
        return rows
    column = columns[0]

    def convert(row: Row) -> Row:
        if not isinstance(row[column], list):
            return {column: row[column]}
        return {column: [_renamed(turn, names, f"message {n} of {column}") for n, turn in enumerate(row[column])]}

    features = None
    if rows.features is not None:
        features = Features({**rows.features, column: TURNS})
    keywords = {"convert_row": convert, "code": code_digest()}
    return rows.map(_numbered, with_indices=True, fn_kwargs=keywords, features=features)


def _renamed(turn: Any, names: Mapping[str, str], place: str) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    hidden = set(names) | set(names.values())
    for key, others in (("role", "speaker"), ("content", "text")):
        if key in names:
            hidden |= set(tables()[others])
    renamed = {key: value for key, value in turn.items() if key not in hidden}
    for new, old in names.items():
        if old not in turn:
            raise RowError(f"{place} has no `{old}`, which `columns` names as its {new}")
        renamed[new] = turn[old]
    return renamed
