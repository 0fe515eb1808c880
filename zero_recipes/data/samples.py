"""The prompts that a model answers before and after training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from zero_recipes.core.errors import Refusal
from zero_recipes.data.load import alpaca_prompt, alpaca_row


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
        return [_sample(row, tokenizer) for row in eval_rows.take(int(requested))]
    path = Path(str(requested))
    if not path.is_file():
        raise Refusal(
            "ZR517",
            f"there is no file of sample prompts {path}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
            "Check sample_prompts: a number, a JSON Lines file or a list of prompts.",
        )
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    try:
        return [_sample(alpaca_row(row) if dataset_format == "alpaca" else row, tokenizer) for row in rows]
    except KeyError as error:
        raise Refusal(
            "ZR518",
            f"a row of {path} has no {error}",
            "Its rows must have the columns of the recipe's data.",
            "Add the column.",
        ) from error


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
