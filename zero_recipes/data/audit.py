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
from zero_recipes.core.tables import Column, print_columns
from zero_recipes.data.answers import NO_ANSWER, answer_lengths, roles_in
from zero_recipes.data.source import Source

SLIPS = 0.01  # tatsu-lab/alpaca has 28 empty answers in 52,002 rows
THE_DATA = Source("the data")


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
    empty: list[int]  # row numbers whose text, or whose every answer, is empty or blank
    unanswered: list[int]  # row numbers of chats in which the assistant has no turn
    answers: bool  # the rows have answers apart from what is asked; False for plain texts and token ids

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
    answers = answer_lengths(rows, training_args.dataset_text_field)
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
        empty=[] if answers is None else np.flatnonzero(answers == 0).tolist(),
        unanswered=[] if answers is None else np.flatnonzero(answers == NO_ANSWER).tolist(),
        answers=answers is not None and not {"completion", "messages", "conversations"}.isdisjoint(rows.column_names),
    )


def audit_findings(
    found: Audit, rows: Dataset, tokenizer: PreTrainedTokenizerBase, source: Source = THE_DATA
) -> list[Finding]:
    """What is wrong with the data, in the parts of a finding."""
    findings = list(_answer_findings(found, rows, source))
    if found.without_supervision:
        number = found.without_supervision[0]
        findings.append(
            Finding(
                "ZR512",
                f"{len(found.without_supervision)} rows carry no loss at all; the first is {source.row(number)}: "
                f"{str(rows[number])[:200]}",
                "TRL would drop them silently.",
                "Fill their answers, or remove them.",
            )
        )
    if found.dropped == found.rows:
        findings.append(
            Finding(
                "ZR513",
                f"no row of {source.split} is left",
                "max_length ends before every answer.",
                "Raise max_length.",
            )
        )
    elif found.dropped > found.rows / 2:
        findings.append(
            Finding(
                "ZR537",
                f"{found.dropped:,} of {found.rows:,} rows of {source.split} are dropped "
                f"({found.dropped / found.rows:.0%})",
                "max_length ends before their answers begin: TRL drops what carries no loss.",
                "Raise max_length, or shorten the prompts.",
                level="warning",
            )
        )
    elif not found.supervised and not findings:
        findings.append(
            Finding(
                "ZR536",
                f"no token of {source.split} carries loss",
                "A row's first token is never predicted, and no row has a second one with loss: the loss would be 0.",
                "Give rows with text, or labels other than -100.",
            )
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


def _answer_findings(found: Audit, rows: Dataset, source: Source) -> Iterator[Finding]:
    """Empty answers and chats without one: an error where they are so many that they cannot be slips."""
    if found.unanswered:
        roles = ", ".join(roles_in(rows[found.unanswered[0]]))
        share = len(found.unanswered) / found.rows
        what = f"{len(found.unanswered):,} of {found.rows:,} chats of {source.split} have no turn of the assistant; "
        what += f"the first is {source.row(found.unanswered[0])}, its roles: {roles}"
        why = "There is no answer in them to learn: the model would be trained to speak as the user."
        fix = "Name the one who answers `assistant`, or remove the chats; ignore: [ZR531] if they are meant so."
        if share >= SLIPS:
            yield Finding("ZR531", what, why, fix)
        else:
            yield Finding("ZR532", what, why, fix, level="warning")
    if found.empty:
        share, parts = len(found.empty) / found.rows, "answers" if found.answers else "texts"
        what = f"{len(found.empty):,} of {found.rows:,} {parts} of {source.split} are empty; "
        what += f"the first is {source.row(found.empty[0])}"
        why = "The model learns to end at once." if found.answers else "Only the end of text would be trained on."
        if share >= (SLIPS if found.answers else 1):
            yield Finding("ZR533", what, why, "Fill or remove them; ignore: [ZR533] if they are meant so.")
        else:
            yield Finding("ZR534", what, why, "Fill or remove them.", level="warning")


def overlap_findings(training: Dataset, evaluation: Dataset, source: Source) -> Iterator[Finding]:
    """At most one finding: tokenised evaluation rows that are training rows too."""
    known = {ids.tobytes() for ids, _ in _ids_and_labels(training)}
    same = [number for number, (ids, _) in enumerate(_ids_and_labels(evaluation)) if ids.tobytes() in known]
    if same:
        yield Finding(
            "ZR538",
            f"{len(same):,} of {len(evaluation):,} rows of {source.split} are training rows too; the first is "
            f"{source.row(same[0])}",
            "Their evaluation loss falls with the training loss, whatever the model has understood.",
            "Remove them from one of the two.",
            level="warning",
        )


def show_audit(found: Audit, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> None:
    """The counts as a table, and three rows with the supervised part in colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
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
        text = Text(f"row {number}: ", style="bold")
        row = tokenised[number]
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            text.append(tokenizer.decode([token]), style="dim" if label == -100 else "bold green")
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
