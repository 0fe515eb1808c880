"""What is read from, set in and called on private parts of transformers, TRL and datasets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from zero_recipes.libs import parts_of_huggingface as parts
from zero_recipes.libs import parts_of_trl

if TYPE_CHECKING:
    from datasets import Dataset  # a look at a recipe needs it not

PARALLEL = "TOKENIZERS_PARALLELISM"


@contextlib.contextmanager
def without_deepspeed_announcement() -> Iterator[None]:
    """transformers knows of no DeepSpeed configuration here, and afterwards of the one that it knew before.

    Under ZeRO stage 3 from_pretrained and from_config are collective, through zero.Init; here they are neither. What is
    announced here (HfTrainerDeepSpeedConfig announces itself to all) is forgotten.
    """
    from transformers.integrations import deepspeed

    parts.DEEPSPEED_ANNOUNCEMENT.require()
    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


def count_tokens_with_loss(trainer: Trainer) -> None:
    """Let the Trainer count the tokens of a step that have a loss, as SFTTrainer computes it, for every model.

    transformers (trainer.py, `_get_num_items_in_batch`) counts nothing for models whose own loss takes no count
    (`accepts_loss_kwargs = False`), and a row's first token, which has no loss, for those without a `loss_type`.
    """
    for name in ("model_accepts_loss_kwargs", "_loss_shifts_labels"):
        parts.TOKEN_WEIGHTS.of(trainer, name)
        setattr(trainer, name, True)


def rows_left_over(loader) -> int:
    """Rows in the last batches of an epoch, over all ranks, before accelerate fills them with the epoch's first rows.

    0 where it fills none: the rows divide, are dropped, come one batch at a time on one process, or are rebalanced.
    `loader`: a training data loader as accelerate has prepared it, before any batch is skipped. accelerate 1.15 counts
    them too (data_loader.py, DataLoaderStateMixin.begin), but loses the count in `skip_first_batches`: SkipBatchSampler
    has no `batch_size`, and begin() suppresses the AttributeError. See docs/upstream/accelerate_skip_batch_sampler.md.
    """
    sampler = loader.batch_sampler
    if isinstance(loader, DataLoaderDispatcher):  # counts while it hands out
        return loader.gradient_state.remainder
    if not isinstance(sampler, BatchSamplerShard) or sampler.drop_last or sampler.batch_size is None:
        return 0
    return len(loader.dataset) % (sampler.batch_size * (1 if sampler.split_batches else sampler.num_processes))


def attention_in_force(model: PreTrainedModel) -> str | None:
    """The attention implementation that the model has taken."""
    return parts.ATTENTION.of(model.config, "_attn_implementation")


def kept_in_fp32(model: PreTrainedModel) -> set[str]:
    """Parts of names of the tensors that the model's class keeps in float32."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {part for name in names for part in parts.KEPT_IN_FP32.of(model, name) or ()}


def fingerprint(rows: Dataset) -> str:
    """The datasets library's own hash of these rows and of all that has made them."""
    return parts_of_trl.FINGERPRINT.of(rows, "_fingerprint")


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """os.environ is the same object afterwards, and tokenizers may use all cores again.

    datasets 5.2 (arrow_dataset.py, `map` with num_proc) leaves a copy in its place, and TOKENIZERS_PARALLELISM=false in
    the environment that tokenizers read.
    """
    kept, before = os.environ, os.environ.get(PARALLEL)
    try:
        yield
    finally:
        os.environ = kept  # noqa: B003 - the very object
        os.environ.pop(PARALLEL, None)
        if before is not None:
            os.environ[PARALLEL] = before


def prepare_dataset(rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, packing: bool) -> Dataset:
    """Rows as SFTTrainer's `_prepare_dataset` makes them; it needs three attributes of a trainer, and no model.

    Without TRL's turns (`global_then_local_main_first`): the other ranks are not here.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.trainer import sft_trainer

    parts_of_trl.ROWS.require()
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

    TRL 1.16 (trainer/sft_trainer.py, `__init__`) refuses padding_free with a max_length: it "is not enforced". It has
    been since rows are cut where they are prepared (`_prepare_dataset`), and data/prepare.py does that before there is
    a trainer.
    """
    kept = training_args.max_length
    if training_args.padding_free and not training_args.packing and kept is not None:
        parts_of_trl.CUT_ROWS.require()
        training_args.max_length = None
    try:
        yield
    finally:
        training_args.max_length = kept
