"""One split after the other: tokenised, audited, and whatever a library raises over a row said with the row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.core.findings import Finding, Refusal, raise_errors, refusal
from zero_recipes.core.host_limits import Host
from zero_recipes.data.answers import LONG, longest_row
from zero_recipes.data.audit import THE_DATA, Audit, audit, audit_findings, overlap_findings
from zero_recipes.data.columns import foreign_ids
from zero_recipes.data.library_errors import library_errors, root_cause
from zero_recipes.data.load import reading
from zero_recipes.data.max_length import max_length_findings
from zero_recipes.data.samples import Sample
from zero_recipes.data.source import Source
from zero_recipes.libs.huggingface import prepare_dataset

STREAMED_ROWS = 1000  # of a streamed data set, audited before training
ROWS_OF_A_WORKER = 4000  # at least: 2 s of work; workers take 0.2 s to start for each of TRL's five steps


def tokenise(rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, parallel: bool = True) -> Dataset:
    """input_ids and labels of each row, before truncation, dropping, packing and shuffling.

    By the code that SFTTrainer trains with. `tokenizer`: with the chat template applied.
    """
    whole = copy.copy(training_args)
    whole.max_length, whole.shuffle_dataset = None, False
    whole.dataset_num_proc = workers(len(rows), training_args.dataset_num_proc) if parallel else None
    return prepare_dataset(rows, tokenizer, whole, packing=False)


def finish(tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, packing: bool) -> Dataset:
    """Tokenised rows truncated or packed to max_length, rows without loss dropped, shuffled, as TRL does.

    Packed by one process, whatever dataset_num_proc says: TRL 1.16 packs a thousand rows of one worker's share at a
    time (data_utils.py, `pack_dataset`), so that the packed rows would depend on the number of workers.
    """
    alone = copy.copy(training_args)
    alone.dataset_num_proc = None if packing else workers(len(tokenised), training_args.dataset_num_proc)
    return prepare_dataset(tokenised, tokenizer, alone, packing)


def workers(rows: int, requested: int | None, host: Host | None = None) -> int | None:
    """How many processes prepare so many rows: what the recipe says, else one for each core that this process really
    has, as far as each has enough rows to be worth its start; None for this process alone."""
    if requested is not None:
        return requested
    found = min((host or Host()).cores(), rows // ROWS_OF_A_WORKER)
    return found if found > 1 else None


def with_tokens(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, training_args) -> list[Sample]:
    """The samples with the tokens of prompt and answer as a training row has them, truncated as one.

    By the code that SFTTrainer trains with: a tokenizer may write a word otherwise at a text's beginning than behind
    the prompt (SentencePiece's space mark). The answer's tokens alone carry loss, whatever training gives a loss.
    """
    alone = copy.copy(training_args)
    alone.shuffle_dataset, alone.completion_only_loss, alone.dataset_num_proc = False, True, None
    found = {}
    for templated in (False, True):  # a data set has rows of one kind
        rows = [s.row | {"sample": i} for i, s in enumerate(samples) if s.row is not None and s.templated == templated]
        if rows:
            for row in prepare_dataset(Dataset.from_list(rows), tokenizer, alone, packing=False):
                found[row["sample"]] = {"ids": tuple(row["input_ids"]), "labels": tuple(row["labels"])}
    return [replace(sample, row=None, **found.get(i, {})) for i, sample in enumerate(samples)]


class Split(NamedTuple):
    """Rows tokenised whole, the same as they are trained on, and their counts."""

    tokenised: Dataset
    ready: Dataset
    audit: Audit


def prepare_splits(
    rows, evaluation, tokenizer: PreTrainedTokenizerBase, training_args, skips: bool, sources: tuple[Source, Source]
) -> tuple[list[Split], list[Finding]]:
    """Training rows and, where there are any, evaluation rows, and what is wrong with each and with both together.

    Of a stream the first STREAMED_ROWS. `skips`: the rows are ready as they are.
    """
    packing = training_args.packing
    eval_packing = packing if training_args.eval_packing is None else training_args.eval_packing
    splits, findings = [], []
    for given, packs, source in ((rows, packing, sources[0]), (evaluation, eval_packing, sources[1])):
        if given is not None:
            *split, found = prepare_split(start_of(given, source), tokenizer, training_args, packs, skips, source)
            splits.append(Split(*split))
            findings += [finding for finding in found if finding not in findings]
    if evaluation is not None:
        findings += overlap_findings(splits[0].tokenised, splits[1].tokenised, sources[1])
    return splits, findings


def start_of(rows: Dataset | IterableDataset, source: Source) -> Dataset:
    """The rows, or the first of a stream."""
    if isinstance(rows, Dataset):
        return rows
    with reading(source):
        return Dataset.from_list(list(rows.take(STREAMED_ROWS)))


def prepare_split(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    training_args,
    packing: bool,
    skips: bool,
    source: Source = THE_DATA,
) -> tuple[Dataset, Dataset, Audit, list[Finding]]:
    """One split tokenised whole and as it is trained on, its counts and what is wrong with it.

    `skips`: the rows are ready as they are. Raises Refusal, with the row, for what cannot be tokenised.
    """
    if "input_ids" in rows.column_names:
        raise_errors(list(foreign_ids(rows, 1 + max(tokenizer.get_vocab().values()), source)))
    elif skips:
        raise refusal("ZR530", split=source.split)
    tokenised = rows if skips else _tokenised(rows, tokenizer, training_args, source)
    with library_errors("ZR529", split=source.split):
        ready = rows if skips else finish(tokenised, tokenizer, training_args, packing)
        found = audit(rows, tokenised, ready, tokenizer, training_args)
    cut = [] if skips or training_args.max_length is None else max_length_findings(found, training_args, source)
    return tokenised, ready, found, [*audit_findings(found, rows, tokenizer, source), *cut]


def _tokenised(rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, source: Source) -> Dataset:
    """`tokenise`, with the row that a library stops on."""
    announce_long_row(rows, training_args.dataset_text_field, source)
    try:
        return tokenise(rows, tokenizer, training_args)
    except (Refusal, MemoryError):
        raise
    except Exception as error:
        number, cause = _first_failing(rows, lambda part: tokenise(part, tokenizer, training_args, parallel=False))
        which = source.split if number is None else source.row(number)
        raise refusal(
            "ZR528", which=which, root_cause=root_cause(cause or error), rows=str(rows[number or 0])[:200]
        ) from error


def _first_failing(rows: Dataset, attempt: Callable[[Dataset], object]) -> tuple[int | None, Exception | None]:
    """The first row on which `attempt` fails, and how; found by halves."""
    low, high, cause = 0, len(rows), None
    while True:
        middle = high if high - low == 1 else (low + high) // 2
        try:
            attempt(rows.select(range(low, middle)))
            if middle == high:
                return None, None  # alone they all pass
            low = middle
        except Exception as error:
            cause = error
            if high - low == 1:
                return low, cause
            high = middle


def announce_long_row(rows: Dataset, text_field: str, source: Source) -> None:
    """Say which row a tokenizer will be long at: one row gives no progress bar."""
    columns = [
        name for name in ("prompt", "completion", "messages", "conversations", text_field) if name in rows.features
    ]
    if columns and "input_ids" not in rows.features:
        number, characters = longest_row(rows, columns)
        if characters >= LONG:
            print(f"{source.row(number)} has {characters:,} characters: tokenising it may take a while", flush=True)
