"""The table of bad data sets: tests/unit/test_bad_data.py holds each to its finding."""

from __future__ import annotations

import datetime
import gzip

import pyarrow as pa

from tests.helpers.bad_data import (
    ALPACA,
    CHATML,
    CHATS,
    IDS,
    PAIRS,
    SHAREGPT,
    TEXTS,
    BadData,
    lines,
    parquet,
    with_row,
)

AS_ALPACA = {"dataset_format": "alpaca"}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
STREAMS = {"dataset_streaming": True, "max_steps": 1}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
HEADER = b"instruction,input,output\n"
LONG = {"prompt": "The fish " * 60, "completion": "x"}
NO_ASSISTANT_FIRST = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('must begin with user') }}{% endif %}" + CHATML
)


def jsonl(name, rows, code, *said, level="error", **keys):
    return BadData(name, {"train.jsonl": lines(rows)}, code, said, keys, level)


def file(name, file_name, content, code, *said, level="error", **keys):
    return BadData(name, {file_name: content}, code, said, keys, level)


def eighth(rows, **changes):
    return with_row(rows, 7, **changes)


def _columns():
    place = "row 7 of train (", "train.jsonl line 8)"
    said = {
        "null": (None, "output holds null"),
        "a number": (5, "a number (5)"),
        "a list": (["a"], "a list"),
        "an object": ({"a": 1}, "an object"),
        "a truth value": (True, "true or false"),
        "missing": (..., "output holds null"),
    }
    for name, (value, words) in said.items():
        yield jsonl(f"an answer is {name}", eighth(ALPACA, output=value), "ZR524", *place, words, **AS_ALPACA)
    yield jsonl("an instruction is null", eighth(ALPACA, instruction=None), "ZR524", *place, "instruction", **AS_ALPACA)
    yield jsonl("an input is a number", eighth(ALPACA, input=3), "ZR524", *place, "column input", **AS_ALPACA)
    yield jsonl("the first row lacks a column", with_row(ALPACA, 0, output=...), "ZR524", "line 1)", **AS_ALPACA)
    half = [{"instruction": "a", "input": ""}] * 10 + ALPACA
    yield jsonl("ten rows lack a column", half, "ZR524", "row 0", "10 of 30 rows", **AS_ALPACA)
    every = [row | {"output": 5} for row in ALPACA]
    yield jsonl("all answers are numbers", every, "ZR524", "20 of 20 rows", **AS_ALPACA)
    yield jsonl("a text is null", eighth(TEXTS, text=None), "ZR524", *place, "column text")
    yield jsonl("all texts are null", [{"text": None}] * 4, "ZR524", "4 of 4 rows")
    yield jsonl("texts that pyarrow takes for dates", [{"text": "2020-01-01"}] * 4, "ZR524", "datetime")
    yield jsonl("a prompt is null", eighth(PAIRS, prompt=None), "ZR524", *place, "column prompt")
    nothing = parquet([{"text": b"abc"}] * 3)
    yield file("bytes for texts", "train.parquet", nothing, "ZR524", "train.parquet)", "bytes")
    moment = parquet([{"text": datetime.datetime(2026, 1, 1)}] * 3)
    yield file("times for texts", "train.parquet", moment, "ZR524", "datetime")
    gap = parquet(eighth(PAIRS, completion=None))
    yield file("a null in parquet", "train.parquet", gap, "ZR524", "row 7 of train (", "train.parquet)", "completion")
    yield jsonl("the columns of nobody", [{"a": "b"}] * 3, "ZR508", "the columns a")
    yield jsonl("no input column", [{"instruction": "a", "output": "b"}], "ZR501", "no column input", **AS_ALPACA)


def _chats():
    place = "row 7 of train (", "train.jsonl line 8)", "column messages"
    for name, messages, words in (
        ("empty", [], "without a message"),
        ("null", None, "null"),
        ("a text", "hi", "text ('hi')"),
        ("without content", [{"role": "user", "content": None}], "no content in message 0 (user)"),
        ("of numbers", [{"role": "user", "content": 5}], "a number (5)"),
        ("without roles", [{"content": "a"}], "no role in message 0"),
        ("a list of texts", ["hi"], "text ('hi')"),
    ):
        yield jsonl(f"a chat is {name}", eighth(CHATS, messages=messages), "ZR524", *place, words)
        if messages != "hi":
            continue
        yield jsonl("the same by two processes", eighth(CHATS, messages="hi"), "ZR524", *place, dataset_num_proc=2)
    yield jsonl("the first chat is empty", with_row(CHATS, 0, messages=[]), "ZR524", "row 0", "without a message")
    users = [{"messages": [USER]}] * 8
    yield jsonl("chats of users only", users, "ZR531", "8 of 8 chats", "its roles: user")
    yield jsonl("a chat of users only", eighth(CHATS, messages=[USER]), "ZR531", "1 of 20 chats", "line 8)")
    few = [*CHATS * 6, {"messages": [USER]}]
    yield jsonl("one chat in 121", few, "ZR532", "1 of 121 chats", "line 121)", level="warning")
    gpt = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 8
    yield jsonl("ShareGPT's roles", gpt, "ZR531", "its roles: human, gpt")
    yield jsonl("conversations with role", [{"conversations": [USER, ANSWER]}] * 3, "ZR524", "no from in message 0")
    mixed = SHAREGPT[:4] + [{"conversations": [USER, ANSWER]}] * 8
    yield jsonl("two kinds of conversations", mixed, "ZR524", "row 4", "8 of 12 rows")
    silent = [{"messages": [USER, {"role": "assistant", "content": " "}]}] * 8
    yield jsonl("assistants that say nothing", silent, "ZR533", "8 of 8 answers")
    yield jsonl("chats without a template", CHATS, "ZR527", "column messages", "no chat template", template=None)
    yield jsonl("a template with a mistake", CHATS, "ZR535", "line 2", template="a\n{% for %}")
    yield jsonl("a template of unknown names", CHATS, "ZR528", "'foo' is undefined", template="{{ foo.bar }}")
    turned = eighth(CHATS, messages=[ANSWER])
    for processes in (None, 2):
        keys = {"template": NO_ASSISTANT_FIRST, "dataset_num_proc": processes}
        yield jsonl(f"the template stops at a row, {processes}", turned, "ZR528", *place[:2], "must begin with", **keys)


def _answers():
    yield jsonl("an empty answer", eighth(ALPACA, output=""), "ZR533", "1 of 20 answers", "line 8)", **AS_ALPACA)
    blank = [row | {"completion": " \n"} for row in PAIRS]
    yield jsonl("all answers are blank", blank, "ZR533", "20 of 20 answers")
    few = [*PAIRS * 6, {"prompt": "Say it.\n", "completion": ""}]
    yield jsonl("one empty answer in 121", few, "ZR534", "1 of 121 answers", "line 121)", level="warning")
    yield jsonl("all texts are empty", [{"text": ""}] * 4, "ZR533", "4 of 4 texts")
    yield jsonl("all texts are empty, packed", [{"text": ""}] * 4, "ZR533", "4 of 4 texts", packing=True)
    yield jsonl("an empty text", eighth(TEXTS, text=""), "ZR534", "1 of 20 texts", "line 8)", level="warning")
    late = [LONG] * 19 + PAIRS[:1]
    yield jsonl("most answers are too late", late, "ZR537", "19 of 20 rows", "95%", level="warning")
    yield jsonl("all answers are too late", [LONG] * 19, "ZR513", "no row of train")


def _ids():
    place = "row 7 of train (", "train.jsonl line 8)"
    for name, ids, code, words in (
        ("beyond the vocabulary", [5, 99999, 1, 0], "ZR526", "input_ids holds 99999"),
        ("below zero", [5, -4, 1, 0], "ZR526", "input_ids holds -4"),
        ("null", [5, None, 1, 0], "ZR524", "null among its token ids"),
        ("words", [5, "a", 1, 0], "ZR524", "text ('a')"),
        ("no list", None, "ZR524", "null, not a list of token ids"),
        ("nothing", [], "ZR524", "holds no token"),
    ):
        yield jsonl(f"ids are {name}", eighth(IDS, input_ids=ids), code, *place, words)
    yield jsonl("ids are fractions", eighth(IDS, input_ids=[5, 1.5, 1, 0]), "ZR524", "20 of 20 rows")
    yield jsonl("ids are nested", [{"input_ids": [[5, 6, 7]]}] * 9, "ZR524", "a list ([5, 6, 7])")
    yield jsonl("labels are short", eighth(IDS, labels=[5]), "ZR525", *place, "labels has 1 entries, input_ids 4")
    yield jsonl("labels are null", eighth(IDS, labels=None), "ZR524", *place, "column labels")
    yield jsonl("labels beyond", eighth(IDS, labels=[5, 6, 7, 99999]), "ZR526", *place, "labels holds 99999")
    yield jsonl("labels of -1", eighth(IDS, labels=[5, 6, 7, -1]), "ZR526", *place, "labels holds -1")
    masks = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1]}] * 9
    yield jsonl("masks are short", masks, "ZR525", "completion_mask has 2 entries")
    yield jsonl("rows of one token", [{"input_ids": [5]}] * 9, "ZR536", "no token of train")
    yield jsonl("texts said to be ids", TEXTS, "ZR530", "no column", dataset_kwargs={"skip_prepare_dataset": True})


def _files():
    start, rest = lines(ALPACA[:4]), lines(ALPACA[5:])
    latin = '{"instruction": "é", "input": "", "output": "x"}\n'.encode("latin-1")
    for name, content, code, *words in (
        ("a cut line", start + b'{"instruction": "x", \n' + rest, "ZR522", "train.jsonl line 5: not JSON"),
        ("a bad first line", b'{"instruction: "x"}\n' + rest, "ZR522", "train.jsonl line 1: not JSON"),
        ("a cut last line", lines(ALPACA) + b'{"instruction": "x"', "ZR522", "train.jsonl line 21: not JSON"),
        ("a number for a row", lines(ALPACA) + b"5\n", "ZR522", "line 21: a number (5)"),
        ("a list for a row", lines(ALPACA) + b"[1, 2]\n", "ZR522", "line 21: a list"),
        ("null for a row", lines(ALPACA) + b"null\n", "ZR524", "line 21)", "holds null"),
        ("Latin-1", start + latin, "ZR545", "line 5)", "instruction is not UTF-8"),
        ("UTF-16", lines(ALPACA).decode().encode("utf-16"), "ZR522", "train.jsonl is UTF-16"),
        ("nothing", b"", "ZR522", "train.jsonl is empty"),
        ("blank lines", b"\n\n\n", "ZR522", "train.jsonl holds no row"),
        ("objects without columns", b"{}\n{}\n", "ZR523", "no rows"),
        ("half a character", start + b'{"instruction": "\\ud800"}\n', "ZR522", "line 5: half of a surrogate pair"),
        ("a column twice", start + b'{"input": "a", "input": "b"}\n', "ZR522", "line 5: 'input' stands twice"),
        ("bytes", bytes(range(128, 256)) * 40, "ZR522", "line 1 is not UTF-8"),
        (
            "deep nesting",
            b'{"output": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "ZR522",
            "line 1: nested too deeply",
        ),
    ):
        yield file(f"JSON Lines: {name}", "train.jsonl", content, code, *words, **AS_ALPACA)
    packed = gzip.compress(lines(ALPACA * 50))
    yield file("a cut archive", "train.jsonl.gz", packed[:-40], "ZR522", "train.jsonl.gz ends after line", **AS_ALPACA)
    yield file("no archive", "train.jsonl.gz", lines(ALPACA), "ZR522", "train.jsonl.gz", "Not a gzip", **AS_ALPACA)
    array = b'[{"instruction": "a", "input": "", "output": "b"},\n{"instruction" "a"}]'
    yield file("a list with a mistake", "train.json", array, "ZR522", "train.json line 2: not JSON", **AS_ALPACA)
    yield file("an empty list", "train.json", b"[]", "ZR523", "no rows", **AS_ALPACA)
    yield file("a list of numbers", "train.json", b"[1, 2]", "ZR501", "no column", **AS_ALPACA)
    yield file("Latin-1 in text", "train.txt", "abc\né\n".encode("latin-1"), "ZR522", "train.txt line 2 is not UTF-8")
    yield file("UTF-16 in text", "train.txt", "abc\né\n".encode("utf-16"), "ZR522", "train.txt is UTF-16")
    empty = parquet([], pa.schema([("text", pa.string())]))
    yield file("parquet without rows", "train.parquet", empty, "ZR522", "train.parquet holds no row")
    yield file("cut parquet", "train.parquet", parquet(PAIRS)[:-20], "ZR522", "train.parquet: ")
    yield file("no parquet", "train.parquet", bytes(5000), "ZR522", "train.parquet: ")
    yield file("no arrow", "train.arrow", bytes(range(256)) * 20, "ZR522", "train.arrow: ")
    yield BadData("an empty folder", {}, "ZR506", ("cannot be loaded",))
    two = {"train-1.jsonl": lines(TEXTS), "train-2.jsonl": lines(PAIRS)}
    yield BadData("two kinds of files", two, "ZR522", ("train-2.jsonl has the columns completion, prompt",))
    two = two | {"train-2.jsonl": lines(with_row(TEXTS, 2, text=None))}
    yield BadData("a null in the second file", two, "ZR524", ("row 22 of train", "train-2.jsonl line 3)"))


def _csv():
    for name, content, code, *words in (
        ("a long record", HEADER + b"a,b,c\na,b,c,d\n", "ZR522", "train.csv line 3: 4 fields, the header has 3"),
        ("a short record", HEADER + b"a,b,c\na,b\n", "ZR522", "train.csv line 3: 2 fields"),
        ("long records", HEADER + b"a,b,c,d\na,b,c,d\n", "ZR522", "train.csv line 2: 4 fields"),
        ("a quote left open", HEADER + b'a,b,"c\na,b,2\n', "ZR522", "train.csv after line"),
        ("an answer NA", HEADER + b"a,b,c\na,b,NA\n", "ZR524", "train.csv line 3)", "output holds null"),
        ("an instruction null", HEADER + b"a,b,c\nnull,b,c\n", "ZR524", "line 3)", "instruction holds null"),
        ("an input N/A", HEADER + b'a,"x\ny",c\na,N/A,c\n', "ZR544", "train.csv line 4)", "'N/A' in column input"),
        ("numbers", HEADER + b"a,b,1\na,b,2\n", "ZR524", "train.csv line 2)", "a number (1)"),
        ("Latin-1", HEADER + "a,b,c\né,b,c\n".encode("latin-1"), "ZR522", "train.csv line 3 is not UTF-8"),
        ("UTF-16", (HEADER + b"a,b,c\n").decode().encode("utf-16"), "ZR522", "train.csv is UTF-16"),
        ("a header alone", HEADER, "ZR522", "train.csv holds no row"),
        ("nothing", b"", "ZR522", "train.csv is empty"),
    ):
        yield file(f"CSV: {name}", "train.csv", content, code, *words, **AS_ALPACA)


def _evaluation():
    def both(name, test, code, *said, train=PAIRS, level="error"):
        return BadData(name, {"train.jsonl": lines(train), "test.jsonl": test}, code, said, EVALUATES, level)

    null = lines(eighth(PAIRS, completion=None))
    yield both("evaluation: a null", null, "ZR524", "row 7 of test", "test.jsonl line 8)")
    yield both("evaluation: empty answers", lines([PAIRS[0] | {"completion": ""}]), "ZR533", "1 of 1 answers of test")
    yield both("evaluation: no rows", b"", "ZR522", "test.jsonl is empty")
    yield both("evaluation: too late", lines([LONG] * 19), "ZR513", "no row of test")
    yield both("evaluation: other columns", lines(TEXTS), "ZR522", "has the columns completion, prompt")
    same = lines([{"prompt": "New.\n", "completion": "New."}, *PAIRS[3:5]])
    yield both("evaluation: training rows", same, "ZR538", "2 of 3 rows of test", "test.jsonl line 2)", level="warning")


def _streams():
    place = "row 7 of train (", "train.jsonl line 8)"
    yield jsonl("stream: a null", eighth(TEXTS, text=None), "ZR524", *place, **STREAMS)
    yield jsonl("stream: a number", eighth(TEXTS, text=5), "ZR524", *place, **STREAMS)
    yield jsonl("stream: an Alpaca null", eighth(ALPACA, output=None), "ZR524", *place, **STREAMS, **AS_ALPACA)
    yield jsonl("stream: users only", [{"messages": [USER]}] * 8, "ZR531", "8 of 8 chats", **STREAMS)
    yield jsonl("stream: a template with a mistake", CHATS, "ZR535", "line 1", template="{% x", **STREAMS)
    cut = lines(TEXTS[:4]) + b'{"text": "x", \n' + lines(TEXTS[5:])
    yield file("stream: a cut line", "train.jsonl", cut, "ZR522", "train.jsonl line 5: not JSON", **STREAMS)
    latin = lines(TEXTS[:4]) + '{"text": "é"}\n'.encode("latin-1")
    yield file("stream: Latin-1", "train.jsonl", latin, "ZR522", "train.jsonl line 5 is not UTF-8", **STREAMS)
    yield file("stream: nothing", "train.jsonl", b"", "ZR522", "train.jsonl is empty", **STREAMS)


TABLE = [
    *_columns(), *_chats(), *_answers(), *_ids(), *_files(), *_csv(), *_evaluation(), *_streams(),
]  # fmt: skip
