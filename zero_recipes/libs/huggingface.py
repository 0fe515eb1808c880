"""What is read from, set in and called on private parts of transformers, TRL, accelerate and datasets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from transformers import PreTrainedTokenizerBase, Trainer

from zero_recipes.core.process import environment_kept

if TYPE_CHECKING:
    from datasets import Dataset  # a look at a recipe needs it not


@contextlib.contextmanager
def without_deepspeed_announcement() -> Iterator[None]:
    """transformers knows of no DeepSpeed configuration here, and afterwards of the one that it knew before.

    Under ZeRO stage 3 from_pretrained and from_config are collective, through zero.Init; here they are neither. A
    configuration that is announced here (HfTrainerDeepSpeedConfig announces itself) is forgotten.

    Private: `_hf_deepspeed_config_weak_ref` (transformers 5.23, integrations/deepspeed.py). The public
    unset_hf_deepspeed_config cannot be undone: no public name leads to the object.
    """
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


def count_tokens_with_loss(trainer: Trainer) -> None:
    """Let the Trainer count the tokens of a step that have a loss, as SFTTrainer computes it, for every model.

    Private: `model_accepts_loss_kwargs`, `_loss_shifts_labels` and what training/token_loss.py overrides of the Trainer
    (transformers 5.23, trainer.py). `_get_num_items_in_batch` counts nothing for models whose own loss takes no count
    (`accepts_loss_kwargs = False`), and a row's first token, which has no loss, for those without a `loss_type`.
    """
    trainer.model_accepts_loss_kwargs = trainer._loss_shifts_labels = True


def rows_left_over(loader) -> int:
    """Rows in the last batches of an epoch, over all ranks, before accelerate fills them with the epoch's first rows.

    0 where it fills none: the rows divide, are dropped, come one batch at a time on one process, or are rebalanced.
    `loader`: a training data loader as accelerate has prepared it, before any batch is skipped.

    Private: BatchSamplerShard and DataLoaderDispatcher (accelerate 1.15, data_loader.py). accelerate counts the rows
    too (DataLoaderStateMixin.begin), but loses the count in `skip_first_batches`: SkipBatchSampler has no `batch_size`,
    and begin() suppresses the AttributeError. Upstream: huggingface/accelerate#4235.
    """
    sampler = loader.batch_sampler
    if isinstance(loader, DataLoaderDispatcher):  # counts while it hands out
        return loader.gradient_state.remainder
    if not isinstance(sampler, BatchSamplerShard) or sampler.drop_last or sampler.batch_size is None:
        return 0
    return len(loader.dataset) % (sampler.batch_size * (1 if sampler.split_batches else sampler.num_processes))


def fingerprint(rows: Dataset) -> str:
    """The datasets library's own hash of these rows and of all that has made them.

    Private: `_fingerprint` (datasets 5.2, arrow_dataset.py). Prepared rows are cached under it.
    """
    return rows._fingerprint


def prepare_dataset(rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, packing: bool) -> Dataset:
    """Rows as SFTTrainer makes them, before there is a model, on one process of each machine.

    Private: SFTTrainer._prepare_dataset and `global_then_local_main_first` (TRL 1.16, trainer/sft_trainer.py). The
    method needs three attributes of a trainer; its turns would wait for ranks that are not here.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.trainer import sft_trainer

    template = None
    if training_args.assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
        template = get_training_chat_template(tokenizer)
    only = training_args.completion_only_loss
    stand_in = SimpleNamespace(
        _tokenizer=tokenizer,
        completion_only_loss={"prompt", "completion"} <= set(rows.column_names) if only is None else only,
        chat_template=template,
    )
    turns = sft_trainer.global_then_local_main_first
    sft_trainer.global_then_local_main_first = contextlib.nullcontext
    try:
        with environment_kept():
            return sft_trainer.SFTTrainer._prepare_dataset(
                stand_in, rows, tokenizer, training_args, packing, formatting_func=None, dataset_name="the"
            )
    finally:
        sft_trainer.global_then_local_main_first = turns


@contextlib.contextmanager
def rows_are_cut(training_args) -> Iterator[None]:
    """SFTTrainer may be built here for padding-free batches of rows that are cut to max_length already.

    TRL 1.16 (trainer/sft_trainer.py, `__init__`) refuses padding_free with a max_length: it "is not enforced". Here it
    is: data/prepare.py has TRL cut the rows before there is a trainer.
    """
    kept = training_args.max_length
    if training_args.padding_free and not training_args.packing and kept is not None:
        training_args.max_length = None
    try:
        yield
    finally:
        training_args.max_length = kept
