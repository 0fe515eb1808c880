"""What the loss will see, counted: rows as they were tokenised beside rows as they are trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.core.errors import Finding
from zero_recipes.core.tables import Column, plain, print_columns, terminal


@dataclass
class Audit:
    """One split, counted. Tokens: of one epoch as trained on, the end of text included."""

    rows: int
    truncated: int  # longer than max_length: cut, or with packing "bfd_split" and "wrapped" parted
    dropped: int  # nothing supervised within max_length
    without_supervision: list[int]  # row numbers in which no token is supervised, however long
    tokens: int
    supervised: int
    longest: int  # of a row, before truncation
    unsupervised_ends: int  # rows short enough whose end of text is absent or carries no loss
    shifted_prompts: int  # rows in which the tokenized prompt is no prefix of the tokenised whole
    padding_share: float  # of the tokens computed, in shuffled batches of per_device_train_batch_size
    packing_share: float | None  # of the packed places that hold a token; None without packing

    def __str__(self) -> str:
        packed = "" if self.packing_share is None else f", packs {self.packing_share:.0%} full"
        return (
            f"data          {self.rows:,} rows, {self.tokens:,} tokens, {self.supervised:,} supervised; "
            f"{self.truncated:,} longer than max_length, {self.dropped:,} dropped, longest {self.longest:,}; "
            f"padding {self.padding_share:.0%}{packed}"
        )


def audit(
    rows: Dataset, tokenised: Dataset, ready: Dataset, tokenizer: PreTrainedTokenizerBase, training_args
) -> Audit:
    """Count one split: `rows` as loaded, `tokenised` whole, `ready` as trained on (truncated, packed, dropped)."""
    longest = training_args.max_length
    lengths, without_supervision, unsupervised_ends = [], [], 0
    for number, (ids, labels) in enumerate(_ids_and_labels(tokenised)):
        lengths.append(len(ids))
        if not (labels != -100).any():
            without_supervision.append(number)
        if longest is None or len(ids) <= longest:
            ends = np.flatnonzero(ids == tokenizer.eos_token_id)
            unsupervised_ends += not len(ends) or labels[ends[-1]] == -100
    kept_lengths = [len(ids) for ids, _ in _ids_and_labels(ready)]
    packed = training_args.packing
    pads = not (packed or training_args.padding_free)
    return Audit(
        rows=len(lengths),
        truncated=0 if longest is None else sum(length > longest for length in lengths),
        dropped=0 if packed else len(lengths) - len(kept_lengths),
        without_supervision=without_supervision,
        tokens=sum(kept_lengths),
        supervised=_supervised(ready, packed and training_args.packing_strategy != "wrapped"),
        longest=max(lengths),
        unsupervised_ends=int(unsupervised_ends),
        shifted_prompts=_shifted_prompts(rows, tokenised, tokenizer),
        padding_share=_padding_share(kept_lengths, training_args) if pads and kept_lengths else 0.0,
        packing_share=sum(kept_lengths) / (len(kept_lengths) * longest) if packed and kept_lengths else None,
    )


def audit_findings(found: Audit, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """What is wrong with the data, in the parts of a finding."""
    findings = []
    if found.without_supervision:
        number = found.without_supervision[0]
        findings.append(
            Finding(
                "ZR512",
                f"{len(found.without_supervision)} rows carry no loss at all; the first is row {number}: "
                f"{str(rows[number])[:200]}",
                "TRL would drop them silently.",
                "Fill their answers, or remove them.",
            )
        )
    if found.dropped == found.rows:
        findings.append(
            Finding("ZR513", "no row is left to train on", "max_length ends before every answer.", "Raise max_length.")
        )
    if found.unsupervised_ends:
        findings.append(
            Finding(
                "ZR514",
                f"{found.unsupervised_ends} whole rows have no supervised {tokenizer.eos_token} at their end",
                "The model would not learn to stop.",
                "Let the chat template write it inside the answer, or set eos_token to the token that ends one there.",
                level="warning",
            )
        )
    if found.shifted_prompts:
        findings.append(
            Finding(
                "ZR515",
                f"in {found.shifted_prompts} rows the tokenized prompt is no prefix of prompt and answer",
                "Tokens merge over the border: training has another context than generation.",
                "End the prompt with a line break or a space, or use a chat template.",
                level="warning",
            )
        )
    return findings


def show_audit(found: Audit, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> None:
    """The counts as a table, and three rows with the supervised part in colour."""
    console = terminal()
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
    named, others = Column("what the loss will see", itemgetter(0)), Column("", itemgetter(1))
    print_columns([named], [others], list(counts.items()), console)
    for number in sorted({0, found.rows // 2, found.rows - 1}):
        text = plain(f"row {number}: ", style="bold")
        row = tokenised[number]
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            text.append(plain(tokenizer.decode([token]), style="dim" if label == -100 else "bold green"))
        console.print(text)


def _ids_and_labels(rows: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """input_ids and labels of one row after the other, a thousand in memory at a time."""
    columns = [name for name in ("input_ids", "labels") if name in rows.column_names]
    for batch in rows.select_columns(columns).with_format("numpy").iter(1000):
        yield from zip(batch["input_ids"], batch.get("labels", batch["input_ids"]), strict=True)


def _supervised(ready: Dataset, separated: bool) -> int:
    """Tokens that a loss is computed for: the first token of a row, or of each packed row, is never predicted."""
    total = 0
    starts = iter(ready["seq_lengths"]) if separated else None
    for _, labels in _ids_and_labels(ready):
        carries = labels != -100
        firsts = [0] if starts is None else np.cumsum([0, *next(starts)])[:-1]
        total += int(carries.sum() - carries[firsts].sum())
    return total


def _shifted_prompts(rows: Dataset, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    if "prompt" not in rows.column_names:
        return 0
    shifted, whole = 0, _ids_and_labels(tokenised)
    for batch in rows.select_columns(["prompt"]).iter(1000):
        for prompt in _prompt_ids(batch["prompt"], tokenizer):
            ids, _ = next(whole)
            shifted += ids[: len(prompt)].tolist() != prompt
    return shifted


def _prompt_ids(prompts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]


def _padding_share(lengths: list[int], training_args) -> float:
    shuffled = random.Random(training_args.seed).sample(lengths, len(lengths))
    size = training_args.per_device_train_batch_size
    batches = [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    return 1 - sum(shuffled) / sum(len(batch) * max(batch) for batch in batches)
