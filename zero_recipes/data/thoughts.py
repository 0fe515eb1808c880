"""Thoughts of a thinking model: which stay in a row, and which of their tokens have a loss. The recipe's `thinking`.

A block of thoughts stands between two tags, `<think>` and `</think>` or a template's own. Many templates write an
empty block before an answer without thoughts, or its closing tag alone (GLM-4.7, DeepSeek-V3.1).
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from zero_recipes.data.forms import Row, tables

KEEP = "keep"
LAST = "last"
DROP = "drop"
MASK_EMPTY = "mask_empty"

# `<think>`, `[THINK]`, `<|channel>`: brackets around no space
BRACKETED = r"[<\[◁][^<>\[\]◁▷\s]+[>\]▷]"
TAG_BEFORE = re.compile(rf"({BRACKETED}\w*)\s*\Z")  # Gemma 4 has a word behind it: `<|channel>thought`
TAG_BEHIND = re.compile(rf"\s*({BRACKETED})")
CLOSED_BEFORE = re.compile(r"([<\[◁])/([^<>\[\]◁▷\s]+[>\]▷])\s*\Z")
FILLER = "\ue000"  # a character of private use, which no template looks for


class Tags(NamedTuple):
    """What a block of thoughts begins and ends with."""

    opened: str
    closed: str
    closes_alone: bool = False  # an empty block is the closing one alone

    @property
    def pattern(self) -> str:
        """A regular expression of either tag."""
        return f"{re.escape(self.opened)}|{re.escape(self.closed)}"


THINK = Tags("<think>", "</think>")  # of rows, whatever their template writes


class Block(NamedTuple):
    """The block of thoughts with which a content begins."""

    thoughts: str
    answer_at: int  # the character of the content
    has_opening_tag: bool  # some templates write it after the header, and answers lack it


# the tags of a template


def tags_around(thoughts: str, answer: str, rendered: str, without: str) -> Tags | None:
    """The tags of a block of thoughts; None where a template has none of their own (gpt-oss's channels).

    `rendered`: behind the question, an answer with thoughts; `without`: the same answer without.
    """
    before, _, behind = rendered.partition(thoughts)
    opened = TAG_BEFORE.search(before)
    closed = TAG_BEHIND.match(behind)
    if opened is None or closed is None:
        return None
    header = without.partition(answer)[0]
    closes_alone = closed[1] in header and opened[1] not in header
    tags = Tags(opened[1], closed[1], closes_alone)
    for start, stop in reversed(_blank_blocks(header, tags)):
        header = header[:start] + header[stop:]
    return None if re.search(tags.pattern, header) else tags


def tags_of_empty_block(answer: str, without: str) -> Tags | None:
    """The tags of the empty block that a template writes before each answer; None where it writes none.

    `without`: behind the question, an answer without thoughts.
    """
    header = without.partition(answer)[0]
    closed = CLOSED_BEFORE.search(header)
    if closed is None:
        return None
    opening = closed[1] + closed[2]
    tags = Tags(opening, f"{closed[1]}/{closed[2]}", opening not in header)
    return tags if ends_with_empty_block(header, tags) else None


# thoughts in a content


def block_at_start(content: Any, pairs: Iterable[Tags]) -> Block | None:
    """The block with which a content begins, if it has one and no other; None where it is not so clear."""
    if not isinstance(content, str):
        return None
    for tags in pairs:
        found = re.findall(tags.pattern, content)
        if found not in ([tags.opened, tags.closed], [tags.closed]):
            continue
        before, _, answer = content.partition(tags.closed)
        head, opened, thoughts = before.rpartition(tags.opened)
        if opened and head.strip():
            continue
        answer_at = len(content) - len(answer.lstrip("\n"))
        return Block(thoughts.strip("\n"), answer_at, bool(opened))
    return None


def unclosed_tag(content: Any, pairs: Iterable[Tags]) -> str | None:
    """The tag with which a content begins and that nothing closes; None where there is none."""
    if not isinstance(content, str):
        return None
    for tags in pairs:
        if content.lstrip().startswith(tags.opened) and tags.closed not in content:
            return tags.opened
    return None


def fields_with_thoughts(message: Row) -> dict[str, str]:
    """The fields of a message that hold thoughts, without blank ones."""
    found = {}
    for name in tables()["thoughts"]:
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            found[name] = value
    return found


def without_fields(message: Row) -> None:
    """Take the fields of thoughts out of a message, in place."""
    for name in tables()["thoughts"]:
        message.pop(name, None)


def without_block(message: Row, block: Block) -> None:
    """Take a content's block of thoughts out of a message, in place, also out of its `silent_parts`."""
    message["content"] = message["content"][block.answer_at :]
    parts = []
    for first, last, number in message.get("silent_parts") or []:
        if last > block.answer_at:
            parts.append([max(0, first - block.answer_at), last - block.answer_at, number])
    message.pop("silent_parts", None)
    if parts:
        message["silent_parts"] = parts


# what the recipe says


def turns_without_thoughts(messages: list[Row], thinking: str) -> set[int]:
    """The numbers of the answers whose thoughts `thinking` takes out. `messages`: of a whole row."""
    answers = {number for number, message in enumerate(messages) if message["role"] == "assistant"}
    if thinking == DROP:
        return answers
    if thinking == LAST:
        questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
        last_question = max(questions, default=0)
        return {number for number in answers if number < last_question}
    return set()


def empty_blocks(rendered: str, messages: list[Row], tags: Tags, render: Any) -> list[tuple[int, int]]:
    """Where a template has written empty blocks of thoughts, with the white space behind them.

    What a message says of such a block is not one: the messages are rendered again without the tags in their texts.
    `rendered`: by `render` from the messages.
    """
    found = _blank_blocks(rendered, tags)
    if not found:
        return []
    changed = [_without_tags(message, tags) for message in messages]
    if changed == messages:
        return found
    again = render(changed)
    if len(again) != len(rendered):  # the template has looked at the tags
        return found
    return _blank_blocks(again, tags)


def ends_with_empty_block(text: str, tags: Tags) -> bool:
    """Whether an empty block of thoughts is the last that a text has."""
    blocks = _blank_blocks(text, tags)
    return bool(blocks) and blocks[-1][1] == len(text)


def without_block_at_end(text: str, tags: Tags) -> str:
    """A prompt to answer without the block of thoughts that it opens, and may close."""
    return re.sub(rf"{re.escape(tags.opened)}\s*(?:{re.escape(tags.closed)}\s*)?\Z", "", text)


def _blank_blocks(text: str, tags: Tags) -> list[tuple[int, int]]:
    """Where nothing but spaces stands between the tags, with the spaces behind them."""
    found = []
    opened = None  # the last opening tag, that nothing has closed
    for tag in re.finditer(tags.pattern, text):
        if tag[0] == tags.opened:
            opened = tag
            continue
        start = None
        if opened is None and tags.closes_alone:
            start = tag.start()
        elif opened is not None and not text[opened.end() : tag.start()].strip():
            start = opened.start()
        opened = None
        if start is not None:
            stop = len(text) - len(text[tag.end() :].lstrip())
            found.append((start, stop))
    return found


def _without_tags(message: Row, tags: Tags) -> Row:
    """The message with as many other characters for tags in its texts; a block that begins a content stays."""
    changed = dict(message)
    names = [name for name in ("content", *tables()["thoughts"]) if isinstance(message.get(name), str)]
    for name in names:
        if name == "content" and message["role"] == "assistant" and block_at_start(message[name], [tags]):
            continue
        changed[name] = re.sub(tags.pattern, lambda tag: FILLER * len(tag[0]), message[name])
    return changed
