"""Rows to prompt and completion: one formatter for training and for generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Refusal, raise_errors, refusal
from zero_recipes.data.at_hand import not_loaded, refuse_absent_data, refuse_missing_split, refuse_turns_of_plain_rows
from zero_recipes.data.columns import Fault, checks_of, column_findings, value_finding
from zero_recipes.data.file_faults import fault_in, local_files, mixed_list, nested_too_deeply, ragged
from zero_recipes.data.library_errors import root_cause
from zero_recipes.data.source import Source, both_sources

ALPACA_COLUMNS = ("instruction", "input", "output")
# tokens that exist only for padding, in the vocabularies of the models people fine-tune; Pythia has the first
PADDING_TOKENS = ("<|padding|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]")
PADDING_TOKENS += (
    "<|reserved_special_token_0|>",
    "<unk>",
    "[UNK]",
)  # reserved or never written by a tokenizer of today

# the wrappers of the column `text` in tatsu-lab/alpaca (Stanford's train.py has no line break after "Response:"),
# byte for byte: a model asked with other words than it was tuned on answers worse
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, input: str = "") -> str:
    """Alpaca's prompt, with or without input. The answer follows directly."""
    if input:
        return _WITH_INPUT.format(instruction=instruction, input=input)
    return _WITHOUT_INPUT.format(instruction=instruction)


def alpaca_row(row: dict[str, Any]) -> dict[str, str]:
    """An Alpaca row as TRL's prompt and completion; TRL appends the end-of-text token, which is supervised."""
    return {"prompt": alpaca_prompt(row["instruction"], row["input"] or ""), "completion": row["output"]}


def load_rows(
    script_args, training_args, dataset_args, dataset_format: str | None, checked: bool = True
) -> tuple[Dataset, Dataset | None]:
    """(training rows, evaluation rows or None), formatted. Raises Refusal for what is missing, before any weight.

    `checked=False`: rows that this function has been through before.
    """
    dataset = load_splits(script_args, training_args, dataset_args)
    train = _split(dataset, script_args.dataset_train_split, "dataset_train_split")
    evaluates = str(getattr(training_args.eval_strategy, "value", training_args.eval_strategy)) != "no"
    test = _split(dataset, script_args.dataset_test_split, "dataset_test_split") if evaluates else None
    loaded = [
        None if rows is None else _ready(rows, source, training_args, dataset_format, checked)
        for rows, source in zip((train, test), both_sources(script_args, dataset_args), strict=True)
    ]
    if dataset_format is None:
        refuse_turns_of_plain_rows(loaded[0], getattr(training_args, "assistant_only_loss", False))
    return loaded[0], loaded[1]


def _ready(rows: Dataset | IterableDataset, source: Source, training_args, dataset_format: str | None, checked: bool):
    """One split, checked and formatted. Of a stream the first rows are checked now, the others as they come."""
    with reading(source):
        first = next(iter(rows), None)
    if not first:
        raise _no_rows(source.split, source.files)
    if source.is_csv and (fault := next(filter(None, map(ragged, source.files)), None)) is not None:
        raise _unreadable(source.split, fault, "pandas fills or shifts such records without a message.")
    columns = list(first)
    if dataset_format is not None:
        _require_alpaca_columns(columns, dataset_format)
    else:
        _require_trl_columns(columns, training_args)
    checks = checks_of(first, training_args.dataset_text_field, dataset_format is not None)
    if isinstance(rows, IterableDataset):
        with reading(source):
            fault = mixed_list(source.files)
        if fault is not None:
            raise _unreadable(source.split, fault, "A stream would give every value of that column as JSON text.")
        rows = rows.map(partial(_checked, checks=checks or {}, source=source), with_indices=True)
    elif checked and checks:
        raise_errors(list(column_findings(rows, checks, source)))
    return rows if dataset_format is None else format_rows(rows, dataset_format)


def _checked(row: dict[str, Any], number: int, checks: dict[str, Fault], source: Source) -> dict[str, Any]:
    """A row of a stream as it is. Raises Refusal where it has a fault; whichever rank meets it says so."""
    for column, fault in checks.items():
        if (said := fault(row.get(column))) is not None:
            raise Refusal([value_finding(column, number, said, source, scope="rank")])
    return row


def format_rows(rows: Dataset | IterableDataset, dataset_format: str) -> Dataset | IterableDataset:
    """Rows in `dataset_format` as prompt and completion, all other columns dropped."""
    columns = rows.column_names or list(next(iter(rows)))
    _require_alpaca_columns(columns, dataset_format)
    return rows.map(alpaca_row, remove_columns=columns)


def _require_alpaca_columns(columns: list[str], dataset_format: str) -> None:
    missing = [name for name in ALPACA_COLUMNS if name not in columns]
    if missing:
        raise refusal(
            "ZR501",
            missing=", ".join(missing),
            columns=", ".join(columns),
            dataset_format=dataset_format,
            alpaca_columns=", ".join(ALPACA_COLUMNS),
        )


def load_tokenizer(model_args, training_args) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a padding token that is not the end of text.

    TRL falls back to pad = end of text. Its labels are built before padding, so that the end is supervised all the
    same, but a model saved with pad = eos teaches everyone downstream to mask the end. Raises Refusal where the
    vocabulary has no token that can pad and the recipe names none.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
    )
    end = training_args.eos_token or tokenizer.eos_token
    pad = training_args.pad_token or tokenizer.pad_token
    if pad is None or (pad == end and training_args.pad_token is None):
        vocabulary = tokenizer.get_vocab()
        pad = next((token for token in PADDING_TOKENS if token in vocabulary and token != end), end)
    if pad == end:
        raise refusal("ZR502", model_name_or_path=model_args.model_name_or_path, end=end)
    if pad not in tokenizer.get_vocab():
        raise refusal("ZR503", pad=pad)
    tokenizer.pad_token = pad
    return tokenizer


def load_splits(script_args, training_args, dataset_args) -> DatasetDict:
    """All splits of the data that the recipe names, as they are."""
    from datasets.exceptions import DatasetGenerationError
    from trl import get_dataset

    named = [d.path for d in dataset_args.datasets] or [script_args.dataset_name]
    refuse_absent_data(named)
    mixed = [(each.path, each.data_files) for each in dataset_args.datasets] or [(name, None) for name in named]
    files = [file for name, data_files in mixed for file in local_files(name, data_files)]
    if (fault := nested_too_deeply(files)) is not None:
        raise _unreadable(", ".join(named), fault, "The parsers of the datasets library end the process on it.")
    set_seed(training_args.seed)  # get_dataset splits unseeded: ranks would get different test sets
    try:
        if dataset_args.datasets:
            return get_dataset(dataset_args)
        return load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        fault = fault_in(files)
        if fault is not None or (files and isinstance(error, DatasetGenerationError)):
            why = f"The datasets library: {root_cause(error)}"
            raise _unreadable(", ".join(named), fault or root_cause(error), why) from error
        if "corresponds to no data" in str(error):  # datasets 5.2, arrow_reader.py: of a split without rows
            raise _no_rows(", ".join(named), files) from error
        raise not_loaded(named, error) from error


def _unreadable(what: str, fault: str, why: str) -> Refusal:
    fix = "Correct that file. JSON Lines wants one object a line in UTF-8, the same columns and types in each."
    return refusal("ZR522", what=what, fault=fault, why=why, fix=fix)


def _no_rows(what: str, files: Sequence[Path]) -> Refusal:
    return refusal("ZR523", what=what, files=", ".join(map(str, files[:3])) or "What the recipe names")


@contextlib.contextmanager
def reading(source: Source) -> Iterator[None]:
    """What the datasets library raises over the rows of a stream, with the file and line where they can be found."""
    try:
        yield
    except (Refusal, MemoryError):
        raise
    except Exception as error:
        fault = fault_in(list(source.files)) or root_cause(error)
        raise _unreadable(source.split, fault, f"The datasets library: {root_cause(error)}") from error


def _split(dataset, name: str, key: str):
    refuse_missing_split(dataset, name, key)
    return dataset[name]


def _require_trl_columns(names: list[str], training_args) -> None:
    columns = set(names)
    kinds = (
        {"prompt", "completion"},
        {"messages"},
        {"conversations"},
        {training_args.dataset_text_field},
        {"input_ids"},
    )
    if not any(kind <= columns for kind in kinds):
        alpaca = " These are Alpaca's columns: set dataset_format: alpaca." if set(ALPACA_COLUMNS) <= columns else ""
        raise refusal(
            "ZR508",
            columns=", ".join(sorted(columns)),
            dataset_text_field=training_args.dataset_text_field,
            alpaca=alpaca,
        )


def rows_on_disk(settings: Settings) -> int | None:
    """Training rows of a data set that lies in a folder; None of others, and where TRL makes other rows of them."""
    name, split = settings.dataset_name, settings.dataset_train_split
    if settings.packing or settings.dataset_streaming or not name or not name.startswith((".", "/")):
        return None
    try:
        return len(load_dataset(name, name=settings.dataset_config, split=split))
    except Exception:  # whatever is wrong with it
        return None  # the run refuses it; a plan needs no data
