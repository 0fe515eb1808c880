"""How long the training rows are, for a plan: counted where data and tokenizer are at hand, without asking the hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zero_recipes.config import recipe as recipes
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Refusal, first_line, refusal

if TYPE_CHECKING:
    from datasets import Dataset

MOST = 2000  # rows that are tokenised, spread over all: the mean of Alpaca's is then known to 2 %


@dataclass(frozen=True)
class RowLengths:
    """`lengths`: tokens of rows as they are trained on, truncated. `sequences`: how many a micro batch counts them as:
    so many as they are, or fewer where they are packed. `epoch`: sequences of the whole data; None where not known."""

    lengths: tuple[float, ...]
    sequences: float
    epoch: int | None
    source: str  # where they are from, in words

    @property
    def mean(self) -> float:
        """Tokens of a row."""
        return sum(self.lengths) / len(self.lengths)


def stated(mean: float, settings: Settings, epoch: int | None) -> RowLengths:
    """Rows that all have so many tokens, and that fill their packs. Raises Refusal where max_length is less."""
    longest = settings.max_length
    if longest is not None and mean > longest:
        raise refusal("ZR841", mean=mean, longest=longest)
    sequences = mean / longest if settings.packing and longest else 1.0
    return RowLengths((mean,), sequences, epoch, f"--mean_tokens {mean:g}, all rows alike")


def rows_at_hand(settings: Settings, path: Path) -> RowLengths | str:
    """The rows of a recipe: all as a run of it has prepared them, where one has, else at most MOST of them tokenised
    and packed as a run does it; or why they are not known.

    `path`: the recipe's.
    """
    from zero_recipes.libs.single_process import single_process_env

    if settings.dataset_streaming or settings.streaming:
        return "the data is a stream"
    try:
        with single_process_env(), _offline():
            return _counted(settings, path)
    except Refusal as refusal:
        return refusal.what
    except OSError:
        return "neither data and tokenizer here nor in the cache"
    except Exception as error:  # readers of a dozen formats and tokenizers: the run says what is wrong
        return first_line(error)


def _counted(settings: Settings, path: Path) -> RowLengths:
    from zero_recipes.data import load, prepare, splits, template

    alike = {"deepspeed": None, "fsdp": None, "use_cpu": True, "bf16": False, "fp16": False, "ddp_backend": None}
    here = settings.replace(**alike, dataset_num_proc=None, load_best_model_at_end=False)
    script_args, training_args, model_args, dataset_args, ours = recipes.instances(here, path)
    tokenizer = template.apply_chat_template_file(load.load_tokenizer(model_args, training_args), training_args)
    try:
        rows, evaluation = load.load_rows(script_args, training_args, dataset_args, ours.dataset_format, checked=False)
        ready = prepare.prepared_earlier(rows, evaluation, tokenizer, training_args)
        if ready is not None:
            return of_prepared(ready, f"all {len(rows):,} rows, as a run has prepared them")
    except Refusal:  # of the evaluation rows, which a plan can do without
        training_args.eval_strategy = "no"
        rows, _ = load.load_rows(script_args, training_args, dataset_args, ours.dataset_format, checked=False)
    chosen = rows.select(range(0, len(rows), -(-len(rows) // MOST)))
    if not (training_args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        tokenised = splits.tokenise(chosen, tokenizer, training_args)
        chosen_ready = splits.finish(tokenised, tokenizer, training_args, training_args.packing)
    else:
        chosen_ready = chosen
    epoch = round(len(chosen_ready) * len(rows) / len(chosen))
    whole = f"all {len(rows):,} rows" if len(chosen) == len(rows) else f"{len(chosen):,} of {len(rows):,} rows"
    return replace(of_prepared(chosen_ready, f"{whole} tokenised"), epoch=epoch)


def of_prepared(ready: Dataset, source: str) -> RowLengths:
    """Of rows as they are trained on, truncated and packed. Reads Arrow's buffers, no token."""
    from zero_recipes.data.token_columns import row_lengths, values

    packed = "seq_lengths" in ready.column_names  # TRL's bfd; "wrapped" makes rows of its own, all full
    lengths = values(ready, "seq_lengths") if packed else row_lengths(ready)
    return RowLengths(tuple(lengths.tolist()), len(ready), len(ready), source)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """As if HF_HUB_OFFLINE were set."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
