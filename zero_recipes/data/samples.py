"""The prompts that a model answers before and after training."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from zero_recipes.core.findings import Refusal, first_line, refusal
from zero_recipes.data.load import alpaca_prompt, alpaca_row, load_rows


@dataclass(frozen=True)
class Sample:
    """One prompt, ready to be tokenised, and the answer wanted (None: only shown, not scored)."""

    prompt: str
    reference: str | None
    templated: bool = False  # by a chat template, which has written the special tokens already
    source: str = "the recipe's own"  # where it comes from, for people
    row: dict[str, Any] | None = None  # prompt and completion as a training row has them; None without a reference
    # prompt and answer as training has them, filled in by data/prepare.py: all tokens, and the answer's with -100 for
    # the others; empty where max_length leaves none of the answer
    ids: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()


def takes_rows(requested: Any) -> bool:
    """Whether `sample_prompts` is a number of rows of the test split."""
    return requested is not None and str(requested).isdecimal() and int(requested) > 0


def rows_to_ask(requested: Any, evaluation, script_args, training_args, dataset_args, dataset_format: str | None):
    """The rows that a number of sample prompts is taken of: the evaluation rows, or those of dataset_test_split where
    the run does not evaluate; None where nobody asks for rows, or the data has no such split."""
    if evaluation is not None or not takes_rows(requested):
        return evaluation
    test = copy.copy(script_args)
    test.dataset_train_split = script_args.dataset_test_split
    try:
        return load_rows(test, training_args, dataset_args, dataset_format)[0]
    except Refusal as refusal:
        if refusal.codes != ["ZR507"]:
            raise
        return None  # no such split: `choose_samples` says what for


def choose_samples(
    requested: Any,
    eval_rows,
    dataset_format: str | None,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "test",
) -> list[Sample]:
    """The recipe's `sample_prompts`: a number of rows of the test split, a JSON Lines file, or a list of prompts.

    `eval_rows`: of dataset_test_split, named `split`, whether the run evaluates on them or not; None where the data has
    no such split.
    """
    if requested is None or str(requested) == "0":
        return []
    if isinstance(requested, list):
        wrap = alpaca_prompt if dataset_format == "alpaca" else str
        return [Sample(wrap(_text(prompt, f"sample_prompts, item {i}")), None) for i, prompt in enumerate(requested, 1)]
    if takes_rows(requested):
        if eval_rows is None:
            raise refusal("ZR516", requested=requested, split=split)
        found = enumerate(eval_rows.take(int(requested)))
        return [_sample(row, tokenizer, f"the split {split!r}", f"row {i} of the split {split!r}") for i, row in found]
    path = Path(str(requested))
    if not path.is_file():
        raise refusal("ZR517", path=path, cwd=Path.cwd())
    samples = []
    for number, row in _lines(path):
        try:
            row = alpaca_row(row) if dataset_format == "alpaca" else row
        except KeyError as error:
            raise _no_column(path, error) from error
        samples.append(_sample(row, tokenizer, str(path), f"{path} line {number}"))
    return samples


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, row) of a JSON Lines file. Not splitlines(): a prompt may hold a bare U+2028."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal("ZR423", path=path, error=first_line(error)) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            row, why = None, first_line(error)
        else:
            why = f"It is a {type(row).__name__}."
        if not isinstance(row, dict):
            raise refusal("ZR422", path=path, number=number, why=why)
        yield number, row


def _no_column(path: Path, error: KeyError) -> Refusal:
    return refusal("ZR518", path=path, error=error)


def _sample(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, source: str = "a row", place: str = "a row"
) -> Sample:
    """`source`: what is printed of where it comes from; `place`: the row itself, for a refusal."""
    more = {key: row[key] for key in ("tools", "chat_template_kwargs") if row.get(key)}
    if isinstance(row.get("messages"), list):
        row = {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    if "prompt" not in row:
        raise refusal("ZR519", row=", ".join(row))
    prompt, completion = row["prompt"], row.get("completion")
    trained = None if completion is None or completion == [] else {"prompt": prompt, "completion": completion} | more
    if not isinstance(prompt, list):
        reference = None if trained is None else _text(completion, place)
        return Sample(_text(prompt, place), reference, source=source, row=trained)
    try:
        tools = more.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        text = tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, tools=tools, **more.get("chat_template_kwargs", {})
        )
        reference = None if trained is None else completion[-1]["content"]
    except Exception as error:  # a template is a program, and says what it likes
        raise refusal("ZR424", place=place, name=type(error).__name__, error=first_line(error)) from error
    reference = None if reference is None else _text(reference, place)
    return Sample(_text(text, place), reference, templated=True, source=source, row=trained)


def _text(value: Any, place: str) -> str:
    """`value` as text that a tokenizer takes. Numbers of a recipe are prompts too."""
    what = f"a {type(value).__name__}"
    if type(value) in (str, int, float):
        try:
            return str(value).encode().decode()
        except UnicodeEncodeError:
            what = "half of a surrogate pair"
    raise refusal("ZR757", place=place, first_what=what[0].upper(), what=what[1:])
