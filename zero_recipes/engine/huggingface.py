"""Private parts of transformers, TRL, accelerate and datasets.

Private: `_attn_implementation` of a model's config, and what the part on attention imports of transformers 5.23
(modeling_flash_attention_utils.py, integrations/hub_kernels.py, utils/import_utils.py).
Without them a missing kernel would be found after the weights are loaded.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import hub_kernels

from zero_recipes.config.ds_config import quiet
from zero_recipes.core.process import environment_kept
from zero_recipes.engine.launchers import LAUNCHED

if TYPE_CHECKING:
    from datasets import Dataset  # reading a recipe needs no datasets


@contextlib.contextmanager
def without_deepspeed_announcement() -> Iterator[None]:
    """Let transformers know of no DeepSpeed configuration inside. One that is announced inside is forgotten.

    Under stage 3 from_pretrained and from_config are collective, through zero.Init. Here they are not.

    Private: `_hf_deepspeed_config_weak_ref` (transformers 5.23, integrations/deepspeed.py).
    The public unset_hf_deepspeed_config cannot be undone.
    """
    from transformers.integrations import deepspeed

    with patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        yield


@contextlib.contextmanager
def dtypes_of_the_file(precision: str) -> Iterator[None]:
    """Let from_pretrained leave each tensor in its file's dtype, mapped by safetensors.

    All processes of a machine share the file's cache. What is converted (experts become one tensor) is copied.
    Tensors in `precision` ("bf16", "fp16") are not read: they are on the meta device.

    Private: `_materialize_copy` (transformers 5.23, core_model_loading.py).
    It casts all to one dtype, with "auto" to that of config.json or the file's first tensor.
    """
    from transformers import core_model_loading

    name, dtype = ("BF16", torch.bfloat16) if precision == "bf16" else ("F16", torch.float16)

    def as_it_is(tensor, *_, **__):
        if hasattr(tensor, "get_dtype") and tensor.get_dtype() == name:
            return torch.empty(tensor.get_shape(), dtype=dtype, device="meta")
        return tensor[...]

    with patch.object(core_model_loading, "_materialize_copy", as_it_is):
        yield


def fingerprint(rows: "Dataset") -> str:
    """Return datasets' hash of these rows and of all that has made them.

    Private: `_fingerprint` (datasets 5.2, arrow_dataset.py).
    """
    return rows._fingerprint


def prepare_dataset(rows: "Dataset", tokenizer: PreTrainedTokenizerBase, training_args, packing: bool) -> "Dataset":
    """Make rows as SFTTrainer does, without a model, on one process.

    Private: SFTTrainer._prepare_dataset and `global_then_local_main_first` (TRL 1.16, trainer/sft_trainer.py).
    The method needs three attributes of a trainer. Its turns would wait for other ranks.
    """
    from trl.trainer import sft_trainer

    columns = rows.column_names or list(next(iter(rows)))
    only_completion = training_args.completion_only_loss
    if only_completion is None:
        only_completion = {"prompt", "completion"} <= set(columns)
    stand_in = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=only_completion, chat_template=None)
    if "input_ids" not in columns:
        stand_in.chat_template = training_template(tokenizer, training_args)
    with patch.object(sft_trainer, "global_then_local_main_first", contextlib.nullcontext), environment_kept():
        return sft_trainer.SFTTrainer._prepare_dataset(
            stand_in, rows, tokenizer, training_args, packing, formatting_func=None, dataset_name="the"
        )


def training_template(tokenizer: PreTrainedTokenizerBase, training_args) -> str | None:
    """Return TRL's version of the chat template, with `{% generation %}`, where the loss needs it.

    None where the tokenizer's own does. Raises ValueError where TRL has none.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not training_args.assistant_only_loss or has_generation_markers(tokenizer.chat_template):
        return None
    return get_training_chat_template(tokenizer)


@contextlib.contextmanager
def rows_are_cut(training_args) -> Iterator[None]:
    """Let SFTTrainer be built inside for padding-free batches.

    TRL 1.16 (trainer/sft_trainer.py, `__init__`) refuses padding_free with a max_length: it "is not enforced".
    Here it is: data/prepare.py has TRL cut the rows first.
    """
    max_length = training_args.max_length
    if training_args.padding_free and not training_args.packing:
        max_length = None
    with patch.object(training_args, "max_length", max_length):
        yield


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Put the random states back at its end: every Trainer seeds them.

    CUDA's are left out: before CUDA starts, torch would remember the seed.
    """
    of_python = random.getstate()
    of_numpy = numpy.random.get_state()
    no_cuda_seed = patch.object(torch.cuda, "manual_seed_all", lambda seed: None)
    with no_cuda_seed, torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def single_process_env() -> Iterator[None]:
    """Let libraries take this process for the only one, on the CPU, whatever the launcher set; and be silent.

    accelerate's states are lost: TrainingArguments makes them anew (training_args.py `_setup_devices`).
    """
    from accelerate import PartialState
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    with environment_kept(), quiet(), without_deepspeed_announcement(), random_states_kept():
        for name in list(os.environ):
            if name.startswith(LAUNCHED):
                del os.environ[name]
        try:
            PartialState(cpu=True)  # accelerate's loggers need one
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)


# attention: an installed package, or a kernel of the hub that was built beforehand


def attention_kernel(attn_implementation: str | None) -> str | None:
    """Return the hub's kernel that an attention names or falls back to. None of eager, sdpa and the like."""
    if hub_kernels.is_kernel(attn_implementation):
        return attn_implementation
    return flash.FLASH_ATTN_KERNEL_FALLBACK.get(attn_implementation)


def has_flash_package(attn_implementation: str | None) -> bool:
    """Whether the package of flash_attention_2, _3 or _4 is installed; False of anything else."""
    for version, checks in flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX.items():
        if attn_implementation == f"flash_attention_{version}":
            return checks["general_availability_check"]()
    return False


def attention_name(attn_implementation: str | None) -> str | None:
    """Return what the model's config will say: a kernel's name where it replaces a missing package."""
    if has_flash_package(attn_implementation):
        return attn_implementation
    return attention_kernel(attn_implementation) or attn_implementation


def other_attention(model: PreTrainedModel, requested: str | None) -> str | None:
    """Return the attention that a model has taken, or None where it is what was requested."""
    taken = model.config._attn_implementation
    if requested is None or taken in (requested, attention_kernel(requested)):
        return None
    return taken
