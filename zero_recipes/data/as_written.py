"""Do the trained tokens say what the rows say? Tokens are decoded again and held against the rows' texts.

A row's texts are its contents, part by part, its thoughts in whichever field or tags it has them, and its tool calls'
names and arguments, before anything is made of them for the chat template. Each is looked for in the decoded tokens, in
its order: it must stand there once, as it is, with a loss or without one as the recipe and the row say. White space is
left out on both sides: templates trim it, and tokenizers add it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.core.findings import Finding, finding
from zero_recipes.data.as_read import Reads, mapping_of, messages_as_read
from zero_recipes.data.audit import NO_KEYS, RowKeys, decoded_parts
from zero_recipes.data.forms import PROMPT_TURNS, Row, tables
from zero_recipes.data.masks import Chat, has_turns, mask_by
from zero_recipes.data.thoughts import THINK, Tags, block_at_start, fields_with_thoughts, turns_without_thoughts
from zero_recipes.engine import huggingface

COMPARED_ROWS = 2000  # of a split, spread over all of it
MERGED = 16  # characters at a text's edge that may be in one token with its neighbor's
LONG_ENOUGH = 4  # characters: shorter texts stand in a row again by chance
OWN_KEYS = ("weight", "silent_parts")  # of a message, which are not for the template
PLACEHOLDER = "zr placeholder"


class Text(NamedTuple):
    """A text of a row that must stand in its tokens: where it is from, and whether it has a loss."""

    name: str
    text: str
    has_loss: bool | None  # None: either is right
    turn: int = 0
    merges_before: bool = False  # its beginning may be in one token with the text before it, that has another loss
    merges_after: bool = False  # its end, with the text behind it
    is_of_assistant: bool = False
    is_thought: bool = False
    may_be_left_out: bool = False  # thoughts of an answer to an earlier question
    has_own_block: bool = False  # the content has tags of thoughts
    empty_blocks: int = 0  # without thoughts, that the content has
    may_repeat: bool = False  # templates name a tool again before its result
    spellings: tuple[str, ...] = ()  # that say the same, without white space; else the text alone
    wrong_spellings: tuple[str, ...] = ()  # that say something else
    pieces: tuple["Text", ...] = ()  # that may stand for it


class Tokens(NamedTuple):
    """A tokenized row, decoded, without white space. `losses`: a byte for each character, 1 with a loss."""

    text: str
    losses: bytes


class Place(NamedTuple):
    """Where a text stands in the tokens."""

    start: int
    stop: int
    is_right: bool  # has its loss


@dataclass
class Faults:
    """What is wrong in rows, by its kind: (number of the row, the text or the fault in words)."""

    wrong_loss: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, Text]] = field(default_factory=list)
    changed: list[tuple[int, str]] = field(default_factory=list)
    second_blocks: list[tuple[int, Text]] = field(default_factory=list)  # of thoughts, beside one of the template's
    left_out: list[tuple[int, Text]] = field(default_factory=list)  # thoughts of earlier answers
    # the template's, before answers without thoughts
    empty_blocks: list[tuple[int, Text]] = field(default_factory=list)


@dataclass
class Thoughts:
    """What became of the thoughts of the rows that are compared."""

    rows: int
    of_rows: int
    trained: int = 0
    without_loss: int = 0
    left_out: int = 0  # by the chat template
    removed: int = 0  # by the recipe's `thinking`
    masked_blocks: int = 0  # empty ones before answers that have a loss
    trained_blocks: int = 0

    def __str__(self) -> str:
        counts = {
            "trained": self.trained,
            "in the rows without a loss": self.without_loss,
            "left out by the chat template": self.left_out,
            "removed by `thinking`": self.removed,
            "empty blocks without a loss": self.masked_blocks,
            "empty blocks trained": self.trained_blocks,
        }
        told = [f"{count:,} {words}" for words, count in counts.items() if count]
        compared = "" if self.rows == self.of_rows else f" (in {self.rows:,} of {self.of_rows:,} rows)"
        return f"thoughts: {', '.join(told)}{compared}" if told else ""


class Comparison(NamedTuple):
    """How the rows' texts are held against their tokens."""

    training_args: Any
    tokenizer: Tokenizer
    mask: str | None  # of `mask_by`
    ours: RowKeys
    reads: Reads | None  # of the chat template; None for rows of texts

    @classmethod
    def of(cls, rows: Dataset, tokenizer: Tokenizer, training_args, ours: RowKeys) -> "Comparison":
        """How these rows are compared."""
        mask = mask_by(rows, tokenizer, training_args, ours.assistant_mask)
        reads = None
        if has_turns(rows):
            template = None if mask is not None else huggingface.training_template(tokenizer, training_args)
            reads = Reads.of(tokenizer, template)
        return cls(training_args, tokenizer, mask, ours, reads)

    @property
    def pairs(self) -> tuple[Tags, ...]:
        """The tags that a content may have."""
        return (THINK,) if self.reads is None else tuple(self.reads.splits)

    @property
    def tag(self) -> str:
        """A regular expression of any of them."""
        return "|".join(tags.pattern for tags in self.pairs)

    @property
    def opening_tags(self) -> list[str]:
        """Those that begin a block."""
        return [tags.opened for tags in self.pairs]

    @property
    def empty_block(self) -> str:
        """The template's, without white space."""
        tags = THINK if self.reads is None or self.reads.tags is None else self.reads.tags
        return tags.closed if tags.closes_alone else tags.opened + tags.closed


def compared_as_written(
    rows: Dataset, tokenised: Dataset, tokenizer: Tokenizer, training_args, split: str, ours: RowKeys = NO_KEYS
) -> tuple[list[Finding], Thoughts]:
    """Compare the rows' texts with their decoded tokens. At most one finding of a kind.

    `rows`: before they are made what the chat template reads. `ours`: the recipe's keys.
    """
    numbers = _spread(len(rows), COMPARED_ROWS)
    thoughts = Thoughts(len(numbers), len(rows))
    if "input_ids" in rows.column_names:
        return [], thoughts
    how = Comparison.of(rows, tokenizer, training_args, ours)
    tokens = tokenised.select_columns(["input_ids", "labels"]).select(numbers)
    faults = Faults()
    for number, row, trained in zip(numbers, rows.select(numbers), tokens, strict=True):
        texts = _texts(row, how, thoughts)
        _compare(number, texts, row, _decoded(trained, tokenizer), how, faults, thoughts)
    return list(_findings(faults, how, {"rows": len(numbers), "split": split})), thoughts


def _findings(faults: Faults, how: Comparison, compared: dict[str, Any]) -> Iterator[Finding]:
    """`compared`: how many rows, and of which split."""
    if faults.wrong_loss:
        row, fault = faults.wrong_loss[0]
        takes_another_mask = how.training_args.assistant_only_loss and how.mask != "turn"
        mask_key = "set `assistant_mask: turn`, or " if takes_another_mask else ""
        yield finding("ZR527", count=len(faults.wrong_loss), row=row, fault=fault, mask_key=mask_key, **compared)
    if faults.lost:
        trained = [(number, text) for number, text in faults.lost if text.has_loss]
        row, text = (trained or faults.lost)[0]
        level = "error" if trained else "warning"
        words = text.text.strip()[:80]
        yield finding("ZR528", level=level, count=len(faults.lost), row=row, name=text.name, text=words, **compared)
    if faults.changed:
        row, fault = faults.changed[0]
        yield finding("ZR578", count=len(faults.changed), row=row, fault=fault, **compared)
    if faults.second_blocks:
        row, text = faults.second_blocks[0]
        yield finding("ZR584", count=len(faults.second_blocks), row=row, name=text.name, **compared)
    if faults.left_out:
        row, text = faults.left_out[0]
        keep = "set `thinking: keep`, " if how.reads is not None and how.reads.keeping else ""
        yield finding("ZR579", count=len(faults.left_out), row=row, name=text.name, keep=keep, **compared)
    if faults.empty_blocks:
        row, text = faults.empty_blocks[0]
        yield finding("ZR580", count=len(faults.empty_blocks), row=row, name=text.name, **compared)


def _spread(count: int, most: int) -> range:
    """Numbers of at most so many rows, from the first on."""
    return range(0, count, -(-count // most))


# a row's texts


def _texts(row: Row, how: Comparison, thoughts: Thoughts) -> list[Text]:
    """Of a converted row, in their order. Counts the thoughts that the recipe removes."""
    on_prompt = how.training_args.completion_only_loss is False
    if isinstance(row.get("messages"), list):
        return _texts_of_turns(row["messages"], 0 if on_prompt else row.get(PROMPT_TURNS) or 0, how, thoughts)
    if isinstance(row.get("prompt"), list):
        turns = row["prompt"] + row["completion"]
        return _texts_of_turns(turns, 0 if on_prompt else len(row["prompt"]), how, thoughts)
    if "prompt" in row:
        prompt = Text("prompt", row["prompt"], on_prompt, merges_after=True)
        return [prompt, Text("completion", row["completion"], True, turn=1)]
    name = how.training_args.dataset_text_field
    return [Text(name, row[name], True)]


def _texts_of_turns(messages: list[Row], first_with_loss: int, how: Comparison, thoughts: Thoughts) -> list[Text]:
    texts = []
    removed = turns_without_thoughts(messages, how.ours.thinking)
    questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
    for number, message in enumerate(messages):
        has_loss = number >= first_with_loss
        if how.training_args.assistant_only_loss and message["role"] != "assistant":
            has_loss = False
        if message.get("weight") == 0:
            has_loss = False
        name = f"message {number} ({message['role']})"
        if message["role"] != "assistant":
            found = _contents(message, name, has_loss, how)
        else:
            found = _thoughts(message, name, has_loss)
            found += _contents(message, name, has_loss, how)
            found += _calls(message, name, has_loss)
            found = _each_thought_once(found, message, how)
        is_earlier = any(number < question for question in questions)
        for text in found:
            if number in removed:
                text = text._replace(has_own_block=False)
            if text.is_thought and number in removed:
                thoughts.removed += 1
                continue
            may_be_left_out = text.is_thought and is_earlier
            is_of_assistant = message["role"] == "assistant"
            text = text._replace(turn=number, is_of_assistant=is_of_assistant, may_be_left_out=may_be_left_out)
            texts.append(text)
    return texts


def _each_thought_once(texts: list[Text], message: Row, how: Comparison) -> list[Text]:
    """Without the content's own thoughts where a field has them too."""
    if not fields_with_thoughts(message) or block_at_start(message.get("content"), how.pairs) is None:
        return texts
    found = []
    written = set()
    for text in texts:
        words = text.text.strip()
        if text.is_thought and words in written:
            continue
        if text.is_thought:
            written.add(words)
        found.append(text._replace(has_own_block=False))
    return found


def _thoughts(message: Row, name: str, has_loss: bool) -> list[Text]:
    """Those in fields of their own; the same text in two fields counts once."""
    found = {}
    for key in tables()["thoughts"]:
        thoughts = message.get(key)
        if isinstance(thoughts, str) and thoughts.strip() and thoughts not in found:
            found[thoughts] = Text(f"{name}, {key}", thoughts, has_loss, is_thought=True)
    return list(found.values())


def _contents(message: Row, name: str, has_loss: bool, how: Comparison) -> list[Text]:
    """The content: several texts where its thoughts or its flags part it."""
    content = message.get("content") or ""
    silent = message.get("silent_parts") or []
    thoughts = _spans_of_thoughts(content, how) if message["role"] == "assistant" else []
    edges = {0, len(content)}
    for first, last, *_ in silent + thoughts:
        edges |= {first, last}
    found = []
    for first, last in pairwise(sorted(edges)):
        text = content[first:last]
        if thoughts:
            text = re.sub(how.tag, "", text)
        if not text.strip():
            continue
        parts = [part for begin, end, part in silent if begin <= first < end]
        found.append(
            Text(
                f"{name}, part {parts[0]}" if parts else name,
                text,
                has_loss and not parts,
                merges_before=not parts and any(end == first for _, end, _ in silent),
                merges_after=not parts and any(begin == last for begin, _, _ in silent),
                is_thought=any(begin <= first < end for begin, end in thoughts),
                has_own_block=bool(thoughts),
                empty_blocks=_without_spaces(content).count(how.empty_block),
                spellings=_spellings_of_result(text) if message["role"] == "tool" else (),
            )
        )
    return found or [Text(name, "", has_loss, has_own_block=bool(thoughts))]


def _spellings_of_result(text: str) -> tuple[str, ...]:
    """Of a tool's result, which some templates write as JSON."""
    words = _without_spaces(text)
    return words, *(_without_spaces(json.dumps(text, ensure_ascii=ascii_alone)[1:-1]) for ascii_alone in (False, True))


def _spans_of_thoughts(content: str, how: Comparison) -> list[tuple[int, int]]:
    """Of the thoughts in an answer's content, with their tags. A template may write the tag that opens the first."""
    spans = []
    opened = 0
    is_open = True
    has_opening_tag = False
    for tag in re.finditer(how.tag, content):
        if tag[0] in how.opening_tags:
            opened = tag.start()
            is_open = True
            has_opening_tag = True
        elif is_open:
            spans.append((opened, tag.end()))
            is_open = False
    if is_open and has_opening_tag:
        spans.append((opened, len(content)))
    return spans


def _calls(message: Row, name: str, has_loss: bool) -> list[Text]:
    """Names and arguments of an answer's tool calls, whatever form they have."""
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        calls = json.loads(calls)
    older = message.get("function_call")  # of OpenAI's first API
    texts = []
    for number, call in enumerate([*calls, *([older] if isinstance(older, Mapping) else [])]):
        function = call.get("function")
        if not isinstance(function, Mapping):
            function = call
        place = f"{name}, tool call {number}"
        if isinstance(function.get("name"), str):
            texts.append(Text(f"{place}, its name", function["name"], has_loss, may_repeat=True))
        if function.get("arguments") is not None:
            texts.append(_arguments(function["arguments"], f"{place}, its arguments", has_loss))
    return texts


def _arguments(arguments: Any, name: str, has_loss: bool) -> Text:
    try:
        value = mapping_of(arguments)
    except ValueError:  # of a call that no template reads
        value = arguments
    found = _value(value, name, has_loss)
    wrong = {_without_spaces(str(value))}  # as Python spells it
    for spelling in found.spellings:
        wrong.add(json.dumps(spelling, ensure_ascii=False)[1:-1])  # as a text within JSON
    if isinstance(arguments, str):
        wrong.add(json.dumps(_without_spaces(arguments), ensure_ascii=False)[1:-1])
    return found._replace(wrong_spellings=tuple(wrong.difference(found.spellings)))


def _value(value: Any, name: str, has_loss: bool) -> Text:
    """A value of JSON: as JSON, a text also as it is; or all that is in it, as templates write it that have tags."""
    spellings = [_without_spaces(json.dumps(value, ensure_ascii=ascii_alone)) for ascii_alone in (False, True)]
    pieces = []
    if isinstance(value, str):
        within_quotes = [spelling[1:-1] for spelling in spellings]
        return Text(name, value, has_loss, spellings=(_without_spaces(value), *within_quotes))
    if isinstance(value, Mapping):
        spellings.append(_without_spaces(json.dumps(value, ensure_ascii=False, sort_keys=True)))
        for key, inner in value.items():
            pieces.append(Text(name, str(key), has_loss))
            pieces.append(_value(inner, name, has_loss))
    elif isinstance(value, list):
        pieces = [_value(inner, name, has_loss) for inner in value]
    else:
        spellings.append(str(value))  # None and True, as Jinja writes them
    shown = json.dumps(value, ensure_ascii=False)
    return Text(name, shown, has_loss, spellings=tuple(spellings), pieces=tuple(pieces))


# in the tokens


def _decoded(row: Row, tokenizer: Tokenizer) -> Tokens:
    text = ""
    losses = b""
    for part, has_loss in decoded_parts(row, tokenizer):
        words = _without_spaces(part)
        text += words
        losses += bytes([has_loss]) * len(words)
    return Tokens(text, losses)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _compare(
    number: int, texts: list[Text], row: Row, tokens: Tokens, how: Comparison, faults: Faults, thoughts: Thoughts
) -> None:
    """The first wrong loss or changed text of a row; else the first that is not there; else what is only to be said."""
    lost = None
    left_out = None
    behind_empty_block = None
    cursor = 0
    turn = -1  # none yet
    for text in texts:
        if text.turn != turn:
            turn = text.turn
            start_of_turn = cursor
            is_first_of_turn = True
            lacks_own_block = False
        place = _find(text, tokens, cursor, how.tokenizer)
        if place is None or not place.is_right:  # a template may write a turn's texts in another order
            place = _find(text, tokens, start_of_turn, how.tokenizer) or place
        if place is None or text.pieces:
            spelling = _wrong_spelling(text, texts, tokens, cursor)
            if spelling is not None:
                fault = f"{text.name} are encoded once more, or as Python writes them: {spelling[:80]}"
                faults.changed.append((number, fault))
                return
        if place is None and text.may_be_left_out:
            left_out = left_out or text
            thoughts.left_out += 1
            lacks_own_block = True
            continue
        if place is None:
            lost = lost or text
            continue
        if not place.is_right:
            wrong = f"{text.name} has no loss on all of it" if text.has_loss else f"{text.name} has a loss"
            faults.wrong_loss.append((number, wrong))
            return
        cursor = max(cursor, place.stop)
        if not text.text.strip():
            continue
        if text.is_thought and text.has_loss:
            thoughts.trained += 1
        elif text.is_thought:
            thoughts.without_loss += 1
        before = tokens.text[start_of_turn : place.start]
        if not lacks_own_block and _has_blocks_of_two(text, before, how):
            faults.second_blocks.append((number, text))
            return
        if is_first_of_turn and text.has_loss and text.is_of_assistant and not text.is_thought:
            at = before.rfind(how.empty_block)
            losses = tokens.losses[start_of_turn + at :][: len(how.empty_block)]
            if at >= 0 and 1 not in losses:
                thoughts.masked_blocks += 1
            elif at >= 0 and 0 not in losses and not text.has_own_block:
                thoughts.trained_blocks += 1
                behind_empty_block = behind_empty_block or text
        is_first_of_turn = False
    if lost is not None:
        faults.lost.append((number, lost))
        return
    repeated = _repeated(texts, row, tokens, how)
    if repeated is not None:
        faults.changed.append((number, f"{repeated.name} stands there more often: {repeated.text.strip()[:80]}"))
        return
    if left_out is not None:
        faults.left_out.append((number, left_out))
    if behind_empty_block is not None:
        faults.empty_blocks.append((number, behind_empty_block))


def _find(text: Text, tokens: Tokens, cursor: int, tokenizer: Tokenizer) -> Place | None:
    """The first place from the cursor on that has the right loss, else any; None where the text is not there."""
    wrong = None
    for needle in chain(text.spellings, _spellings(text.text, tokenizer)):
        at = tokens.text.find(needle, cursor)
        while at >= 0:
            stop = at + len(needle)
            if _has_its_loss(text, tokens.losses[at:stop]):
                return Place(at, stop, True)
            wrong = wrong or Place(at, stop, False)
            at = tokens.text.find(needle, at + 1)
        if wrong is not None:
            return wrong
    if not text.pieces:
        return None
    places = [_find(piece, tokens, cursor, tokenizer) for piece in text.pieces]
    if None in places:
        return None
    start = min(place.start for place in places)
    stop = max(place.stop for place in places)
    return Place(start, stop, all(place.is_right for place in places))


def _has_its_loss(text: Text, losses: bytes) -> bool:
    if text.has_loss is None:
        return True
    first = MERGED if text.merges_before else 0
    last = len(losses) - (MERGED if text.merges_after else 0)
    certain = losses[first : max(first, last)]
    return (0 if text.has_loss else 1) not in certain


def _spellings(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """As it is; as the tokenizer spells it (some change Unicode's forms)."""
    yield _without_spaces(text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    again = _without_spaces(tokenizer.decode(ids))
    unknown = tokenizer.unk_token
    if unknown is None or again.count(unknown) == text.count(unknown):
        yield again


def _wrong_spelling(text: Text, texts: list[Text], tokens: Tokens, cursor: int) -> str | None:
    """A wrong spelling that stands before the next turn, in place of a right one."""
    stop = len(tokens.text)
    for other in texts:
        words = _without_spaces(other.text)
        if other.turn > text.turn and words:
            at = tokens.text.find(words, cursor)
            stop = stop if at < 0 else at
            break
    region = tokens.text[cursor:stop]
    if any(spelling in region for spelling in text.spellings):
        return None
    for spelling in text.wrong_spellings:
        if spelling in region:
            return spelling
    return None


def _has_blocks_of_two(text: Text, before: str, how: Comparison) -> bool:
    """Whether a row's own block of thoughts stands behind or within one that the template writes.

    `before`: what stands before the text in its turn.
    """
    if not (text.is_thought or text.has_own_block):
        return False
    has_another_tag = text.is_thought and before.endswith(tuple(tag + tag for tag in how.opening_tags))
    return has_another_tag or before.count(how.empty_block) > text.empty_blocks


def _repeated(texts: list[Text], row: Row, tokens: Tokens, how: Comparison) -> Text | None:
    """A text that stands more often in the tokens than in the row and in what the template writes by itself."""
    if how.reads is None:
        return None
    written = [_without_spaces(text.text) for text in texts]
    by_itself = None
    for words, text in zip(written, texts, strict=True):
        if len(words) < LONG_ENOUGH or text.may_repeat:
            continue
        expected = max("\0".join(written).count(words), "".join(written).count(words))
        found = tokens.text.count(words)
        if found <= expected:
            continue
        if by_itself is None:
            try:
                by_itself = _written_by_template(row, how)
            except Exception:  # it takes no placeholders
                return None
        if found > expected + by_itself.count(words):
            return text
    return None


def _written_by_template(row: Row, how: Comparison) -> str:
    """The row's conversation with placeholders for its texts, without white space."""
    chat = Chat.of_row(row, how.tokenizer)
    messages = []
    for message in chat.messages:
        message = dict(message)
        for key in ("content", *tables()["thoughts"]):
            if message.get(key):
                message[key] = PLACEHOLDER
        if message["role"] == "assistant" and message.get("tool_calls"):
            message["tool_calls"] = [_placeholder_call(call) for call in _as_list(message["tool_calls"])]
        messages.append(message)
    return _without_spaces(chat.render(messages_as_read(messages, how.reads, row=0, thinking=how.ours.thinking)))


def _as_list(calls: Any) -> list[Row]:
    return json.loads(calls) if isinstance(calls, str) else calls


def _placeholder_call(call: Row) -> Row:
    changed = {"name": PLACEHOLDER, "arguments": {}}
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, **changed}}
    return {**call, **changed}


def unread_by_template(rows: Dataset, tokenizer: Tokenizer) -> list[str]:
    """What the rows have and the chat template does not mention: keys of the turns, and the column `tools`.

    Of the rows that are compared.
    """
    template: Any = tokenizer.chat_template or ""
    if not isinstance(template, str):  # several by name
        template = " ".join(template.values())
    names = ["tools"] if "tools" in rows.column_names else []
    compared = rows.select(_spread(len(rows), COMPARED_ROWS))
    for column in ("messages", "prompt", "completion"):
        if column in rows.column_names:
            for turns in compared[column]:
                if isinstance(turns, list):
                    names += chain.from_iterable(turns)
    distinct = dict.fromkeys(names)
    return [name for name in distinct if name not in OWN_KEYS and name not in template]
