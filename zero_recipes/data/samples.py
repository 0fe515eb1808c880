"""The prompts that a model answers before and after training."""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.data.as_read import Reads, messages_as_read, without_thinking
from zero_recipes.data.audit import NO_KEYS, RowKeys
from zero_recipes.data.forms import alpaca_prompt, alpaca_row, tables, turns_of
from zero_recipes.data.load import MissingSplit, load_rows
from zero_recipes.data.masks import Chat, tokenise, without_beginning
from zero_recipes.data.thoughts import DROP
from zero_recipes.engine.huggingface import prepare_dataset


@dataclass(frozen=True)
class Sample:
    """A prompt that the model answers, with the answer that is wanted."""

    prompt: str
    reference: str | None  # the answer wanted; None: only shown, not scored
    templated: bool = False  # by a chat template, which has written the special tokens already
    source: str = "the recipe's own"  # where it comes from, for people
    row: dict[str, Any] | None = None  # prompt and completion as a training row has them; None without a reference
    # by `with_tokens`: all tokens, and -100 for the prompt's; empty where max_length leaves none of the answer
    ids: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()


def takes_rows(requested: Any) -> bool:
    """Whether `sample_prompts` asks for a number of rows of the test split."""
    return str(requested).isdecimal() and int(requested) > 0


def rows_to_ask(requested: Any, evaluation, settings: Settings):
    """The rows that sample prompts are taken from: those of dataset_test_split also where the run does not evaluate.

    None where the data has no such split.
    """
    if evaluation is not None or not takes_rows(requested):
        return evaluation
    try:
        return load_rows(settings.replace(dataset_train_split=settings.dataset_test_split))[0]
    except MissingSplit:
        return None  # no such split: `choose_samples` says what for


def choose_samples(
    requested: Any,
    eval_rows,
    dataset_format: str | None,
    tokenizer: Tokenizer,
    split: str = "test",
    ours: RowKeys = NO_KEYS,
) -> list[Sample]:
    """The samples of a recipe's `sample_prompts`. Raises Refusal.

    `requested`: a number of rows of the test split, a JSON Lines file, or a list of prompts.
    `eval_rows`: of dataset_test_split, named `split`; None where the data has none.
    """
    if requested is None or str(requested) == "0":
        return []
    form: Callable[[Any], dict[str, Any]] = dict
    if isinstance(requested, list):
        source = "the recipe's own"
        rows = requested
        form = partial(_prompt_row, alpaca_prompt if dataset_format == "alpaca" else str)
    elif takes_rows(requested):
        if eval_rows is None:
            raise refusal("ZR516", requested=requested, split=split)
        source = f"the split {split!r}"
        rows = list(eval_rows.take(int(requested)))
    else:
        source = str(requested)
        if dataset_format == "alpaca":
            form = alpaca_row
        refuse_absent_prompts(requested)
        with library_error_as_finding(f"reading {requested} (sample_prompts)"):
            lines = Path(source).read_text("utf-8").split("\n")  # not splitlines(): a prompt may hold a bare U+2028
            rows = [json.loads(line) for line in lines if line.strip()]
    samples = []
    for number, row in enumerate(rows):
        with library_error_as_finding(f"making a prompt of row {number} of {source} (sample_prompts)"):
            samples.append(_sample(form(row), number, tokenizer, source, ours.thinking))
    return samples


def refuse_absent_prompts(requested: Any) -> None:
    """Refuse a file of `sample_prompts` that is not there. Lists, numbers and nothing pass."""
    is_file = isinstance(requested, str) and not requested.isdecimal()
    if is_file and not os.path.exists(requested):
        raise refusal("ZR589", path=requested, cwd=Path.cwd())


def _prompt_row(wrap: Callable[[str], str], prompt: Any) -> dict[str, str]:
    return {"prompt": wrap(_text(prompt))}


def _sample(row: dict[str, Any], number: int, tokenizer: Tokenizer, source: str, thinking: str) -> Sample:
    kept = {key: row[key] for key in tables()["kept"] if row.get(key)}
    prompt, completion = _prompt_and_completion(row)
    trained = None
    if completion not in (None, []):
        trained = {"prompt": prompt, "completion": completion} | kept
    templated = isinstance(prompt, list)
    if templated:
        read = messages_as_read(prompt, Reads.of(tokenizer), number, thinking)
        chat = Chat.of_row({"messages": read} | kept, tokenizer)
        if thinking == DROP:
            chat = chat._replace(options=without_thinking(tokenizer) | chat.options)
        prompt = chat.render(read, to_answer=True)
        completion = completion and completion[-1]["content"]
    else:
        prompt = without_beginning(_text(prompt), tokenizer)
    reference = None if trained is None else _text(completion)
    return Sample(_text(prompt), reference, templated, source, trained)


def _prompt_and_completion(row: dict[str, Any]) -> tuple[Any, Any]:
    """Texts, or lists of messages; the completion is None where there is none."""
    for name in tables()["conversations"]:
        if isinstance(row.get(name), list):
            turns = turns_of(row, name)
            return turns[:-1], turns[-1:]
    prompt = row["prompt"]
    completion = row.get("completion")
    if isinstance(prompt, list):
        prompt = turns_of(row, "prompt")
        completion = turns_of(row, "completion") if completion else None
    return prompt, completion


def _text(value: Any) -> str:
    """No half of a surrogate pair. Numbers of a recipe are prompts too."""
    if type(value) not in (str, int, float):
        raise TypeError(f"{value!r} is not text")
    return str(value).encode().decode()


@library_error_as_finding("tokenizing the rows of sample_prompts")
def with_tokens(samples: list[Sample], tokenizer: Tokenizer, training_args, ours: RowKeys = NO_KEYS) -> list[Sample]:
    """The samples with the tokens of prompt and answer as a training row has them, truncated as one.

    A tokenizer may write a word otherwise at a text's beginning than behind the prompt (SentencePiece's space mark).
    The answer's tokens alone carry loss, whatever training gives a loss. Raises Refusal.
    """
    single = copy.copy(training_args)
    single.shuffle_dataset = False
    single.completion_only_loss = True
    single.dataset_num_proc = None
    found = {}
    for templated in (False, True):  # a data set has rows of one kind
        rows = []
        for number, sample in enumerate(samples):
            if sample.row is not None and sample.templated == templated:
                rows.append(sample.row | {"sample": number})
        if rows:
            asked = Dataset.from_list(rows, on_mixed_types="use_json")
            tokenised = tokenise(asked, tokenizer, single, ours, "sample_prompts")
            for row in prepare_dataset(tokenised, tokenizer, single, packing=False):
                found[row["sample"]] = {"ids": tuple(row["input_ids"]), "labels": tuple(row["labels"])}
    return [replace(sample, row=None, **found.get(number, {})) for number, sample in enumerate(samples)]
