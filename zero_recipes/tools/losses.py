"""The loss of a saved model on a few rows, before and after it is exported."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import datasets
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.data.audit import RowKeys
from zero_recipes.data.forms import Rows
from zero_recipes.data.load import load_rows
from zero_recipes.data.samples import Sample, choose_samples, with_tokens
from zero_recipes.metrics.read_runs import SampleRow
from zero_recipes.training.answers import reference_losses

ROWS = 8
LONGEST = 1024  # tokens of a text that no max_length cuts


@dataclass(frozen=True)
class LossRows:
    """Rows that a loss is computed on."""

    source: str  # in words
    samples: list[Sample]  # with their tokens


def rows_at_hand(settings: Settings, path: Path, tokenizer: Tokenizer, texts: list[SampleRow]) -> LossRows:
    """Find rows for a loss: of the run's evaluation split, else of its training split, else `texts`.

    The Hub is not asked.
    `path`: the recipe's. `texts`: of samples.jsonl. All their tokens count, since nothing says where an answer begins.
    """
    with _offline():
        for split in (settings.dataset_test_split, settings.dataset_train_split):
            samples = _of_split(settings.replace(dataset_train_split=split), path, tokenizer)
            if samples:
                return LossRows(f"the split {split!r}", samples)
    return LossRows("sample prompts with their answers", [_of_text(row, tokenizer) for row in texts])


@contextmanager
def _offline() -> Iterator[None]:
    with patch.object(constants, "HF_HUB_OFFLINE", True), patch.object(datasets.config, "HF_HUB_OFFLINE", True):
        yield


def _of_split(settings: Settings, path: Path, tokenizer: Tokenizer) -> list[Sample]:
    """The first rows of dataset_train_split that have a loss; empty where they are not on this machine."""
    split = settings.dataset_train_split
    ours = RowKeys.of(settings)
    try:
        rows: Rows = load_rows(settings.replace(eval_strategy="no"))[0]
        samples = choose_samples(ROWS, rows, settings.dataset_format, tokenizer, split, ours)
        training_args = trl_arguments(settings, path).training
        samples = with_tokens(samples, tokenizer, training_args, ours)
    except Exception:  # readers of a dozen formats: other rows take their place
        return []
    return [sample for sample in samples if _has_loss(sample)]


def _of_text(row: SampleRow, tokenizer: Tokenizer) -> Sample:
    """The prompt as the model got it, and its answer."""
    text = row.prompt + (row.reference or row.after or "")
    has_start = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = tuple(tokenizer(text, add_special_tokens=not has_start)["input_ids"][:LONGEST])
    return Sample(row.prompt, row.reference, ids=ids, labels=ids)


def of_samples(samples: list[Sample]) -> LossRows | None:
    """Choose the samples that have a loss. None where none has."""
    chosen = [sample for sample in samples if _has_loss(sample)][:ROWS]
    return LossRows(chosen[0].source, chosen) if chosen else None


def _has_loss(sample: Sample) -> bool:
    return any(label != -100 for label in sample.labels[1:])


def mean_loss(model: PreTrainedModel, tokenizer: Tokenizer, rows: LossRows) -> float:
    """Compute the mean loss over the tokens of all rows, each row by itself."""
    total = 0.0
    tokens = 0
    for sample in rows.samples:
        loss = reference_losses(model, tokenizer, [sample], model.device)[0]
        if loss is not None:
            count = sum(label != -100 for label in sample.labels[1:])
            total += loss * count
            tokens += count
    return total / max(tokens, 1)


def is_close(loss: float, expected: float, dtype: torch.dtype) -> bool:
    """Whether rounding alone can have made the difference. False of NaN."""
    bound = 1e-3 if dtype == torch.float32 else 0.02
    return abs(loss - expected) <= bound * max(expected, 1.0)
