"""Rows to prompt and completion: one formatter for training and for generation."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Refusal
from zero_recipes.data.at_hand import not_loaded, refuse_absent_data, refuse_missing_split, refuse_turns_of_plain_rows

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


def load_rows(script_args, training_args, dataset_args, dataset_format: str | None) -> tuple[Dataset, Dataset | None]:
    """(training rows, evaluation rows or None), formatted. Raises Refusal for what is missing, before any weight."""
    dataset = load_splits(script_args, training_args, dataset_args)
    train = _split(dataset, script_args.dataset_train_split, "dataset_train_split")
    evaluates = str(getattr(training_args.eval_strategy, "value", training_args.eval_strategy)) != "no"
    test = _split(dataset, script_args.dataset_test_split, "dataset_test_split") if evaluates else None
    if dataset_format is None:
        for rows in (train, test):
            if rows is not None:
                _require_trl_columns(rows, training_args)
        refuse_turns_of_plain_rows(train, training_args.assistant_only_loss)
        return train, test
    return format_rows(train, dataset_format), None if test is None else format_rows(test, dataset_format)


def format_rows(rows: Dataset | IterableDataset, dataset_format: str) -> Dataset | IterableDataset:
    """Rows in `dataset_format` as prompt and completion, all other columns dropped."""
    columns = rows.column_names or list(next(iter(rows)))
    missing = [name for name in ALPACA_COLUMNS if name not in columns]
    if missing:
        raise Refusal(
            "ZR501",
            f"the data set has no column {', '.join(missing)}; it has {', '.join(columns)}",
            f"dataset_format: {dataset_format} makes prompts of the columns {', '.join(ALPACA_COLUMNS)}.",
            "Rename the columns, or remove dataset_format for rows with prompt/completion, messages or text.",
        )
    return rows.map(alpaca_row, remove_columns=columns)


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
        raise Refusal(
            "ZR502",
            f"{model_args.model_name_or_path} pads with its end of text, {end!r}",
            "Later training from the saved model would mask the padding in the loss, and with it the "
            "end of every answer.",
            "Set pad_token to a token of its vocabulary that the data never uses.",
        )
    if pad not in tokenizer.get_vocab():
        raise Refusal(
            "ZR503",
            f"pad_token {pad!r} is not in the model's vocabulary",
            "TRL stops on it (sft_trainer.py), but only once the model is loaded.",
            "Name a token that the model has.",
        )
    tokenizer.pad_token = pad
    return tokenizer


def load_splits(script_args, training_args, dataset_args) -> DatasetDict:
    """All splits of the data that the recipe names, as they are."""
    from trl import get_dataset

    named = [d.path for d in dataset_args.datasets] or [script_args.dataset_name]
    refuse_absent_data(named)
    set_seed(training_args.seed)  # get_dataset splits unseeded: ranks would get different test sets
    try:
        if dataset_args.datasets:
            return get_dataset(dataset_args)
        return load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    except (FileNotFoundError, ConnectionError, ValueError, OSError) as error:
        raise not_loaded(named, error) from error


def _split(dataset, name: str, key: str):
    refuse_missing_split(dataset, name, key)
    return dataset[name]


def _require_trl_columns(rows: Dataset | IterableDataset, training_args) -> None:
    columns = set(rows.column_names or next(iter(rows)))
    kinds = (
        {"prompt", "completion"},
        {"messages"},
        {"conversations"},
        {training_args.dataset_text_field},
        {"input_ids"},
    )
    if not any(kind <= columns for kind in kinds):
        alpaca = " These are Alpaca's columns: set dataset_format: alpaca." if set(ALPACA_COLUMNS) <= columns else ""
        raise Refusal(
            "ZR508",
            f"the data set has the columns {', '.join(sorted(columns))}",
            "TRL trains on prompt and completion, messages, conversations, input_ids or the column that "
            f"dataset_text_field names ({training_args.dataset_text_field}).",
            f"Rename the columns, or set dataset_text_field.{alpaca}",
        )


def rows_on_disk(settings: Settings) -> int | None:
    """Training rows of a data set that lies in a folder; None of others, and where TRL makes other rows of them."""
    name, split = settings.dataset_name, settings.dataset_train_split
    if settings.packing or settings.dataset_streaming or not name or not name.startswith((".", "/")):
        return None
    try:
        return len(load_dataset(name, name=settings.dataset_config, split=split))
    except (ValueError, OSError):
        return None  # the run refuses it; a plan needs no data
