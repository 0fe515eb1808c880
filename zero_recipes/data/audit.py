"""What the loss will see, counted: rows as they were tokenised beside rows as they are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.tables import Column, plain, print_columns, terminal
from zero_recipes.data.answers import NO_ANSWER, answer_lengths, roles_in
from zero_recipes.data.source import Source
from zero_recipes.data.token_columns import (
    BATCH,
    TokenBatch,
    last_positions,
    padding_share,
    row_lengths,
    sums,
    tables,
    token_batches,
)

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
    most: int  # tokens that 99 % of the rows have at most, before truncation
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
    longest, lengths, supervised, ended = training_args.max_length, [], [], []
    for batch in token_batches(tokenised):
        lengths.append(batch.lengths)
        supervised.append(sums(batch.labels != -100, batch.starts, batch.ends))
        ended.append(_learns_to_end(batch, tokenizer.eos_token_id))
    whole, supervised, ended = map(np.concatenate, (lengths, supervised, ended))
    fits = np.full(len(whole), True) if longest is None else whole <= longest
    kept = row_lengths(ready)
    packed = training_args.packing
    answers = answer_lengths(rows, training_args.dataset_text_field)
    return Audit(
        rows=len(whole),
        truncated=int((~fits).sum()),
        dropped=0 if packed else len(whole) - len(kept),
        without_supervision=np.flatnonzero(supervised == 0).tolist(),
        tokens=int(kept.sum()),
        supervised=_supervised(ready, packed and "seq_lengths" in ready.column_names),
        longest=int(whole.max()),
        most=int(np.quantile(whole, 0.99, method="higher")),
        unsupervised_ends=int((fits & ~ended).sum()),
        shifted_prompts=_shifted_prompts(rows, tokenised, tokenizer),
        padding_share=padding_of(kept, training_args),
        packing_share=int(kept.sum()) / (len(kept) * longest) if packed and len(kept) else None,
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
            finding(
                "ZR512",
                number_of_without_supervision=len(found.without_supervision),
                row=source.row(number),
                rows=str(rows[number])[:200],
            )
        )
    if found.dropped == found.rows:
        findings.append(finding("ZR513", split=source.split))
    elif found.dropped > found.rows / 2:
        findings.append(
            finding(
                "ZR537",
                dropped=found.dropped,
                rows=found.rows,
                split=source.split,
                dropped_2=found.dropped / found.rows,
            )
        )
    elif not found.supervised and not findings:
        findings.append(finding("ZR536", split=source.split))
    if found.unsupervised_ends:
        findings.append(finding("ZR514", unsupervised_ends=found.unsupervised_ends, eos_token=tokenizer.eos_token))
    if found.shifted_prompts:
        findings.append(finding("ZR515", shifted_prompts=found.shifted_prompts))
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
            yield finding("ZR531", what=what, why=why, fix=fix)
        else:
            yield finding("ZR532", what=what, why=why, fix=fix)
    if found.empty:
        share, parts = len(found.empty) / found.rows, "answers" if found.answers else "texts"
        what = f"{len(found.empty):,} of {found.rows:,} {parts} of {source.split} are empty; "
        what += f"the first is {source.row(found.empty[0])}"
        why = "The model learns to end at once." if found.answers else "Only the end of text would be trained on."
        if share >= (SLIPS if found.answers else 1):
            yield finding("ZR533", what=what, why=why)
        else:
            yield finding("ZR534", what=what, why=why)


def overlap_findings(training: Dataset, evaluation: Dataset, source: Source) -> Iterator[Finding]:
    """At most one finding: tokenised evaluation rows that are training rows too."""
    wanted = list(_ids_as_bytes(evaluation))
    known = set(wanted).intersection(_ids_as_bytes(training))
    same = [number for number, ids in enumerate(wanted) if ids in known]
    if same:
        yield finding(
            "ZR538",
            number_of_same=len(same),
            number_of_evaluation=len(evaluation),
            split=source.split,
            row=source.row(same[0]),
        )


def show_audit(found: Audit, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> None:
    """The counts as a table, and three rows with the supervised part in colour."""
    console = terminal()
    counts = {
        "rows": f"{found.rows:,}",
        f"truncated at {training_args.max_length}": f"{found.truncated:,}",
        "dropped, no answer within max_length": f"{found.dropped:,}",
        "tokens": f"{found.tokens:,}",
        "supervised tokens": f"{found.supervised:,} ({found.supervised / max(1, found.rows):.1f} a row)",
        "longest row, in tokens": f"{found.longest:,}; 99 % have at most {found.most:,}",
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


def padding_of(lengths: np.ndarray, training_args) -> float:
    """Of the tokens computed, the share that is padding. `lengths`: of the rows as trained on, shape (rows,)."""
    if training_args.packing or training_args.padding_free:
        return 0.0
    return padding_share(lengths, training_args.per_device_train_batch_size, training_args.seed)


def _learns_to_end(batch: TokenBatch, eos_token_id: int | None) -> np.ndarray:
    """For each row whether its last end of text carries loss; False where it has none."""
    last = last_positions(np.flatnonzero(batch.ids == eos_token_id), batch.ends)
    found = last >= 0
    found[found] = batch.labels[last[found]] != -100
    return found


def _ids_as_bytes(rows: Dataset) -> Iterator[bytes]:
    for batch in token_batches(rows.select_columns(["input_ids"])):
        flat = batch.ids.astype(np.int64)
        yield from (flat[start:end].tobytes() for start, end in zip(batch.starts, batch.ends, strict=True))


def _supervised(ready: Dataset, separated: bool) -> int:
    """Tokens that a loss is computed for: the first token of a row, or of each packed row, is never predicted."""
    total = 0
    parts = tables(ready, ["seq_lengths"]) if separated else None
    for batch in token_batches(ready):
        carries = batch.labels != -100
        lengths = batch.lengths
        if parts is not None:  # of the packed rows, one after the other as the tokens are
            lengths = np.asarray(pc.list_flatten(next(parts)["seq_lengths"].combine_chunks()))
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        total += int(carries.sum() - carries[firsts].sum())
    return total


def _shifted_prompts(rows: Dataset, tokenised: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    if "prompt" not in rows.column_names:
        return 0
    shifted, whole = 0, token_batches(tokenised.select_columns(["input_ids"]))
    for texts in rows.select_columns(["prompt"]).iter(BATCH):
        prompts, batch = _prompt_ids(texts["prompt"], tokenizer), next(whole)
        lengths = np.fromiter(map(len, prompts), dtype=np.int64, count=len(prompts))
        flat = np.fromiter(chain.from_iterable(prompts), dtype=np.int64, count=lengths.sum())
        ends = np.cumsum(lengths)
        shift = np.repeat(batch.starts - (ends - lengths), lengths)  # from a prompt's place to that in the whole row
        ids = np.append(batch.ids, -1)  # for a prompt that is longer than the last row
        other = flat != ids[np.minimum(np.arange(len(flat)) + shift, len(batch.ids))]
        shifted += int(((sums(other, ends - lengths, ends) > 0) | (lengths > batch.lengths)).sum())
    return shifted


def _prompt_ids(prompts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return tokenizer(prompts, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
