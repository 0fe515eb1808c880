"""What the loss will see: rows tokenised by TRL's own code and counted, without a model."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.refusal import Finding


@dataclass
class Audit:
    """One split, counted. Tokens are those that remain after truncation, the end of text included."""

    rows: int
    truncated: int  # longer than max_length
    dropped: int  # nothing supervised within max_length
    without_supervision: list[int]  # row numbers in which no token is supervised, however long
    tokens: int
    supervised: int
    longest: int  # of a row, before truncation
    unsupervised_ends: int  # whole rows whose last token, the end of text, carries no loss
    shifted_prompts: int  # rows in which the tokenised prompt is no prefix of the tokenised whole
    padding_share: float  # of the tokens computed, in shuffled batches of per_device_train_batch_size
    packing_share: float | None  # of the packed places that hold a token; None without packing


def tokenise(rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> Dataset:
    """input_ids and labels of each row, before truncation and packing, by the code that SFTTrainer trains with.

    trl/trainer/sft_trainer.py `_prepare_dataset` needs three attributes of the trainer, none of them the model.
    """
    from trl import SFTTrainer
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    whole = copy.copy(training_args)
    whole.max_length = None
    first = next(iter(rows))
    only = training_args.completion_only_loss
    template = None
    if training_args.assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
        template = get_training_chat_template(tokenizer)
    stand_in = SimpleNamespace(
        _tokenizer=tokenizer,
        completion_only_loss=("prompt" in first and "completion" in first) if only is None else only,
        chat_template=template,
    )
    return SFTTrainer._prepare_dataset(stand_in, rows, tokenizer, whole, False, None, "audited")


def audit(rows: Dataset, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> Audit:
    """Count one tokenised split as it will be trained on."""
    longest = training_args.max_length
    ids, labels = tokenised["input_ids"], tokenised["labels"]
    kept = [(row[:longest], label[:longest]) for row, label in zip(ids, labels, strict=True)]
    kept = [(row, label) for row, label in kept if any(token != -100 for token in label)]
    whole = [label for label in labels if longest is None or len(label) <= longest]
    return Audit(
        rows=len(ids),
        truncated=0 if longest is None else sum(len(row) > longest for row in ids),
        dropped=len(ids) - len(kept),
        without_supervision=[i for i, label in enumerate(labels) if all(token == -100 for token in label)],
        tokens=sum(len(row) for row, _ in kept),
        supervised=sum(token != -100 for _, label in kept for token in label[1:]),
        longest=max(map(len, ids)),
        unsupervised_ends=sum(label[-1] != tokenizer.eos_token_id for label in whole),
        shifted_prompts=_shifted_prompts(rows, ids, tokenizer),
        padding_share=_padding_share([len(row) for row, _ in kept], training_args),
        packing_share=_packing_share(kept, training_args) if training_args.packing else None,
    )


def audit_findings(found: Audit, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """What is wrong with the data, in the parts of a finding."""
    findings = []
    if found.without_supervision:
        number = found.without_supervision[0]
        findings.append(
            Finding(
                f"{len(found.without_supervision)} rows carry no loss at all; the first is row {number}: "
                f"{str(rows[number])[:200]}",
                "TRL would drop them without a word.",
                "Fill their answers, or remove them.",
            )
        )
    if found.dropped == found.rows:
        findings.append(
            Finding("no row is left to train on", "max_length ends before every answer.", "Raise max_length.")
        )
    if found.unsupervised_ends:
        findings.append(
            Finding(
                f"{found.unsupervised_ends} whole rows do not end with a supervised {tokenizer.eos_token}",
                "The model would not learn to stop.",
                "Let the chat template write it inside the answer, or set eos_token.",
                level="warning",
            )
        )
    if found.shifted_prompts:
        findings.append(
            Finding(
                f"in {found.shifted_prompts} rows the tokenised prompt is no prefix of prompt and answer",
                "Tokens merge over the border: the model is trained on another context than it is asked with.",
                "End the prompt with a line break or a space, or use a chat template.",
                level="warning",
            )
        )
    return findings


def show(found: Audit, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> None:
    """The counts as a table, and three rows with the supervised part in colour."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(), Table("what the loss will see", "", title="training data")
    counts = {
        "rows": f"{found.rows:,}",
        f"truncated at {training_args.max_length}": f"{found.truncated:,}",
        "dropped, no answer within max_length": f"{found.dropped:,}",
        "tokens": f"{found.tokens:,}",
        "supervised tokens": f"{found.supervised:,} ({found.supervised / max(1, found.rows):.1f} a row)",
        "longest row, in tokens": f"{found.longest:,}",
        "padding": f"{100 * found.padding_share:.1f} % of the tokens computed",
    }
    if found.packing_share is not None:
        counts["packing"] = f"{100 * found.packing_share:.1f} % of the places filled"
    for name, count in counts.items():
        table.add_row(name, count)
    console.print(table)
    for number in sorted({0, found.rows // 2, found.rows - 1}):
        text = Text(f"row {number}: ", style="bold")
        row = tokenised[number]
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            text.append(tokenizer.decode([token]), style="dim" if label == -100 else "bold green")
        console.print(text)


def _shifted_prompts(rows: Dataset, ids: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> int:
    if "prompt" not in rows.column_names or not isinstance(rows[0]["prompt"], str):
        return 0
    prompts: list[Any] = tokenizer(list(rows["prompt"]))["input_ids"]
    return sum(row[: len(prompt)] != prompt for prompt, row in zip(prompts, ids, strict=True))


def _padding_share(lengths: list[int], training_args) -> float:
    if training_args.packing or training_args.padding_free or not lengths:
        return 0.0
    shuffled = random.Random(training_args.seed).sample(lengths, len(lengths))
    size = training_args.per_device_train_batch_size
    batches = [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    return 1 - sum(shuffled) / sum(len(batch) * max(batch) for batch in batches)


def _packing_share(kept: list[tuple[list[int], list[int]]], training_args) -> float:
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": [row for row, _ in kept], "labels": [label for _, label in kept]})
    packed = pack_dataset(rows, training_args.max_length, training_args.packing_strategy)
    return sum(map(len, packed["input_ids"])) / (len(packed) * training_args.max_length)
