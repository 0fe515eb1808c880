"""The prompts that a model answers before and after training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from zero_recipes.core.errors import Refusal, first_line
from zero_recipes.data.columns import OPTIONAL_TEXT, chat_fault, text_fault
from zero_recipes.data.file_faults import json_lines
from zero_recipes.data.library_errors import library_errors, root_cause
from zero_recipes.data.load import alpaca_prompt, alpaca_row
from zero_recipes.data.source import named


@dataclass(frozen=True)
class Sample:
    """One prompt, ready to be tokenised, and the answer wanted (None: only shown, not scored)."""

    prompt: str
    reference: str | None
    templated: bool = False  # by a chat template, which has written the special tokens already


def choose_samples(
    requested: Any, eval_rows, dataset_format: str | None, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """The recipe's `sample_prompts`: a number of evaluation rows, a JSON Lines file, or a list of prompts."""
    if requested is None or str(requested) == "0":
        return []
    if isinstance(requested, list):
        odd = next((prompt for prompt in requested if not isinstance(prompt, (str, int, float))), "")
        if not isinstance(odd, (str, int, float)):
            raise Refusal(
                "ZR543",
                f"sample_prompts holds {named(odd)}",
                "Each entry of the list is one prompt.",
                "Write it as text, in quotes.",
            )
        wrap = alpaca_prompt if dataset_format == "alpaca" else str
        return [Sample(wrap(str(prompt)), None) for prompt in requested]
    if str(requested).isdigit():
        if eval_rows is None:
            raise Refusal(
                "ZR516",
                f"sample_prompts: {requested} needs evaluation rows, but the run has none",
                'eval_strategy is "no", so no evaluation split is loaded.',
                "Set eval_strategy, or name a JSON Lines file or a list of prompts.",
            )
        what = "the evaluation rows cannot be made prompts"
        with library_errors("ZR546", what, "TRL or transformers", "Correct the chat template, or the rows."):
            return [_sample(row, tokenizer) for row in eval_rows.take(int(requested))]
    path = Path(str(requested))
    if not path.is_file():
        raise Refusal(
            "ZR517",
            f"there is no file of sample prompts {path}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
            "Check sample_prompts: a number, a JSON Lines file or a list of prompts.",
        )
    samples = []
    for number, row in _rows_of(path):
        try:
            samples.append(_sample(alpaca_row(row) if dataset_format == "alpaca" else row, tokenizer))
        except KeyError as error:
            raise Refusal(
                "ZR518",
                f"a row of {path} has no {error}",
                "Its rows must have the columns of the recipe's data.",
                "Add the column.",
            ) from error
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(
                "ZR541",
                f"{path} line {number} cannot be made a prompt: {root_cause(error)}",
                f"The line: {str(row)[:200]}",
                "Correct it, or the chat template.",
            ) from error
    return samples


def _rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line from 1, row) of a JSON Lines file; a column that should hold text or a chat holds one."""
    try:
        lines = json_lines(path)
    except (ValueError, OSError) as error:
        fix = "Give one JSON object a line, in UTF-8."
        raise Refusal("ZR540", "the sample prompts cannot be read", first_line(error), fix) from error
    for number, row in lines:
        for column, fault in _faults(row):
            raise Refusal(
                "ZR542",
                f"{path} line {number}: {column} {fault}",
                "A prompt is text or a chat.",
                "Correct or remove the line.",
            )
        yield number, row


def _faults(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    checks = {name: text_fault for name in ("instruction", "output") if name in row}
    checks |= {"input": OPTIONAL_TEXT} if "input" in row else {}
    for name in ("prompt", "completion"):
        if row.get(name) is not None or (name == "prompt" and name in row):
            checks[name] = chat_fault if isinstance(row[name], list) else text_fault
    checks |= {"messages": chat_fault} if "messages" in row else {}
    for name, check in checks.items():
        if (fault := check(row[name])) is not None:
            yield name, fault


def _sample(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Sample:
    if "messages" in row:
        row = {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    if "prompt" not in row:
        raise Refusal(
            "ZR519",
            f"sample prompts cannot be made of rows with the columns {', '.join(row)}",
            "A prompt and its answer are needed: prompt and completion, messages, or Alpaca's columns.",
            "Give sample_prompts as a list of prompts, or set dataset_format.",
        )
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str):
        return Sample(prompt, completion)
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return Sample(text, completion[-1]["content"] if completion else None, templated=True)
