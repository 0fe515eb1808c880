"""Private parts of transformers, TRL, accelerate and datasets.

Private: `_attn_implementation` of a model's config, and what the part on attention imports of transformers 5.23
(modeling_flash_attention_utils.py, integrations/hub_kernels.py, utils/import_utils.py).
Without them a missing kernel would be found after the weights are loaded.
"""

import contextlib
import os
import pickle
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import hub_kernels

from zero_recipes.config.ds_config import quiet
from zero_recipes.core.files import PICKLES, package_yaml
from zero_recipes.core.findings import first_line
from zero_recipes.core.process import environment_kept

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset  # reading a recipe needs no datasets


@contextlib.contextmanager
def without_deepspeed_announcement() -> Iterator[None]:
    """transformers knows of no DeepSpeed configuration inside. One that is announced inside is forgotten.

    Under stage 3 from_pretrained and from_config are collective, through zero.Init. Here they are not.

    Private: `_hf_deepspeed_config_weak_ref` (transformers 5.23, integrations/deepspeed.py).
    The public unset_hf_deepspeed_config cannot be undone.
    """
    from transformers.integrations import deepspeed

    with patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", None):
        yield


@contextlib.contextmanager
def dtypes_of_the_file(precision: str) -> Iterator[None]:
    """from_pretrained leaves each tensor in its file's dtype, mapped by safetensors.

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


def count_tokens_with_loss(trainer: Trainer) -> None:
    """Let the Trainer count a step's tokens that have a loss in SFTTrainer, for every model.

    Private: `model_accepts_loss_kwargs`, `_loss_shifts_labels` and what training/token_loss.py overrides of the Trainer
    (transformers 5.23, trainer.py).
    `_get_num_items_in_batch` counts nothing where the model has `accepts_loss_kwargs = False`.
    Where it has no `loss_type`, it counts a row's first token, which has no loss.
    """
    trainer.model_accepts_loss_kwargs = trainer._loss_shifts_labels = True


def is_shuffled(rows: "IterableDataset") -> bool:
    """Whether a stream, or a part of one, is drawn from a shuffle buffer.

    Private: `_ex_iterable` of a stream, and the parts that it is made of (datasets 5.2, iterable_dataset.py). Nothing
    public says it, and `set_epoch` would also change the order of the files of a stream that nobody has shuffled.
    """
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    waiting = [rows._ex_iterable]
    while waiting:
        part = waiting.pop()
        if isinstance(part, BufferShuffledExamplesIterable):
            return True
        waiting += getattr(part, "ex_iterables", [])
        if hasattr(part, "ex_iterable"):
            waiting.append(part.ex_iterable)
    return False


def rows_left_over(loader) -> int:
    """Rows in an epoch's last batches, over all ranks, before accelerate fills them with the first rows.

    0 where it fills none.
    `loader`: accelerate's, before any batch is skipped.

    Private: BatchSamplerShard and DataLoaderDispatcher (accelerate 1.15, data_loader.py).
    accelerate's own count (DataLoaderStateMixin.begin) is lost in `skip_first_batches`:
    SkipBatchSampler has no `batch_size`, and begin() suppresses the AttributeError.
    Upstream: huggingface/accelerate#4235.
    """
    if isinstance(loader, DataLoaderDispatcher):  # counts while it hands out
        return loader.gradient_state.remainder
    sampler = loader.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or sampler.drop_last or sampler.batch_size is None:
        return 0
    at_once = sampler.batch_size
    if not sampler.split_batches:
        at_once *= sampler.num_processes
    return len(loader.dataset) % at_once


def fingerprint(rows: "Dataset") -> str:
    """datasets' hash of these rows and of all that has made them.

    Private: `_fingerprint` (datasets 5.2, arrow_dataset.py).
    """
    return rows._fingerprint


def prepare_dataset(rows: "Dataset", tokenizer: PreTrainedTokenizerBase, training_args, packing: bool) -> "Dataset":
    """Rows as SFTTrainer makes them, without a model, on one process.

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
    """TRL's version of the chat template, with `{% generation %}`, where the loss needs it.

    None where the tokenizer's own does. Raises ValueError where TRL has none.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not training_args.assistant_only_loss or has_generation_markers(tokenizer.chat_template):
        return None
    return get_training_chat_template(tokenizer)


def read_texts_as_texts() -> None:
    """Keep texts in JSON files texts.

    Private: `json_encode_field` and `json_encode_fields_in_json_lines` (datasets 5.2, utils/json.py),
    as packaged_modules/json/json.py calls them.
    A field of several types is stored as JSON. A text that is JSON is taken for encoded already:
    the answer "2101" becomes a number, "0210" becomes 210, and "null" is no answer.
    """
    from datasets.packaged_modules.json import json as reader
    from datasets.utils.json import ujson_dumps, ujson_loads

    if hasattr(reader.json_encode_field, "unpatched"):
        return

    def json_encode_field(example: Any, json_field_path: list) -> Any:
        if example is None:
            return None
        if not json_field_path:
            return ujson_dumps(example)
        name, *rest = json_field_path
        if name == 0:  # each entry of a list
            return [json_encode_field(entry, rest) for entry in example]
        return {**example, name: json_encode_field(example.get(name), rest)}

    def json_encode_fields_in_json_lines(original_batch: bytes, json_field_paths: list) -> bytes:
        lines = []
        for line in original_batch.splitlines():
            example = ujson_loads(line)
            for path in json_field_paths:
                example = json_encode_field(example, path)
            lines.append(ujson_dumps(example))
        return "\n".join(lines).encode()

    json_encode_field.unpatched = reader.json_encode_field
    reader.json_encode_field = json_encode_field
    reader.json_encode_fields_in_json_lines = json_encode_fields_in_json_lines


@contextlib.contextmanager
def rows_are_cut(training_args) -> Iterator[None]:
    """SFTTrainer may be built inside for padding-free batches.

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
    """Every Trainer seeds them. CUDA's are left out: before CUDA starts, torch would remember the seed."""
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
    """One process on the CPU, whatever the launcher set; silent libraries.

    accelerate's states are lost: TrainingArguments makes them anew (training_args.py `_setup_devices`).
    """
    from accelerate import PartialState
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    launched = tuple(package_yaml(__package__, "tables.yaml")["launched"])
    with environment_kept(), quiet(), without_deepspeed_announcement(), random_states_kept():
        for name in list(os.environ):
            if name.startswith(launched):
                del os.environ[name]
        try:
            PartialState(cpu=True)  # accelerate's loggers need one
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)


# attention: an installed package, or a kernel of the hub that was built beforehand


def attention_kernel(attn_implementation: str | None) -> str | None:
    """The hub's kernel that it names or falls back to. None of eager, sdpa and the like."""
    if hub_kernels.is_kernel(attn_implementation):
        return attn_implementation
    return flash.FLASH_ATTN_KERNEL_FALLBACK.get(attn_implementation)


def has_flash_package(attn_implementation: str | None) -> bool:
    """Of flash_attention_2, _3 or _4; False of anything else."""
    for version, checks in flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX.items():
        if attn_implementation == f"flash_attention_{version}":
            return checks["general_availability_check"]()
    return False


def attention_name(attn_implementation: str | None) -> str | None:
    """What the model's config will say: a kernel's name where it replaces a missing package."""
    if has_flash_package(attn_implementation):
        return attn_implementation
    return attention_kernel(attn_implementation) or attn_implementation


def other_attention(model: PreTrainedModel, requested: str | None) -> str | None:
    """None where it is what was requested."""
    taken = model.config._attn_implementation
    if requested is None or taken in (requested, attention_kernel(requested)):
        return None
    return taken


# pickles without code: DeepSpeed 0.19.8 loads its own with weights_only=False, which runs code in them

NEVER_LOADED = "training_args.bin"  # by a run or by transformers' resume
REFUSED = re.compile(r"[Uu]nsupported|WeightsUnpickler error")  # messages of torch/_weights_only_unpickler.py


def load_without_code(path: Path) -> Any:
    """What torch.save wrote, with mapped tensors. Raises torch.load's errors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from transformers.trainer_pt_utils import safe_globals

    def stage(kind: type, name: str) -> ZeroStageEnum:
        """Python 3.11.2 (Debian 12) pickles a member of an enum as `getattr(kind, name)`."""
        if kind is not ZeroStageEnum:
            raise pickle.UnpicklingError(f"getattr of {kind} is no data")
        return ZeroStageEnum[name]

    of_deepspeed = [
        DynamicLossScaler,
        LossScaler,
        ZeroStageEnum,
        fragment_address,
        (stage, "builtins.getattr"),
        (stage, "__builtin__.getattr"),
    ]
    with safe_globals(), torch.serialization.safe_globals(of_deepspeed):
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def not_plain(path: Path) -> str | None:
    """Why a file cannot be read without running code. None if it can, or is no pickle by its name."""
    if not path.name.endswith(PICKLES) or path.name == NEVER_LOADED:
        return None
    try:
        load_without_code(path)
    except Exception as error:  # any kind: the file is a stranger's
        lines = str(error).splitlines()
        return next(filter(REFUSED.search, lines), first_line(error)).strip().rstrip(".")
    return None
