"""Tokenizer, base and model of what is asked, each as its run had it; what cannot be loaded is refused before."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from zero_recipes.ask.target import Target
from zero_recipes.checkpoint.saved_model import embedding_rows, entries_of
from zero_recipes.core import units
from zero_recipes.core.findings import Refusal, first_line, refusal
from zero_recipes.core.host_limits import Host
from zero_recipes.data.load import PADDING_TOKENS
from zero_recipes.model import load_config, load_model, parameter_sizes, refuse_missing_attention, refuse_other_keys

_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_BYTES = {"float64": 8, "float32": 4}


class Loaded(NamedTuple):
    """A model to be asked."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str
    autocast: str | None

    def computing(self):
        """The context that its run computed in."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, getattr(torch, self.autocast))

    def without_adapter(self):
        """The context in which an adapter is switched off; nothing for a model without one."""
        return self.model.disable_adapter() if hasattr(self.model, "disable_adapter") else nullcontext()


def load_tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the model, else the base's. Raises Refusal."""
    own = any((target.folder / name).is_file() for name in _TOKENIZER)
    place = str(target.folder) if own else target.base
    if place is None:
        raise refusal("ZR575", folder=target.folder)
    tokenizer = _read_tokenizer(place, target.settings.trust_remote_code)
    if tokenizer.pad_token is None:  # masked, whatever it is
        known = tokenizer.get_vocab()
        tokenizer.pad_token = next((token for token in PADDING_TOKENS if token in known), tokenizer.eos_token)
    return tokenizer


def refuse_what_does_not_load(
    target: Target, tokenizer: PreTrainedTokenizerBase, device: str, at_once: int = 1
) -> None:
    """Base and model as far as they can be known without their weights: shape, vocabulary, attention, memory.

    `at_once`: how many models lie in memory together. Raises Refusal.
    """
    refuse_missing_attention(target.settings.attn_implementation, device)
    config = None if target.is_adapter else load_config(*_arguments(target, str(target.folder))[:2])
    if target.base is not None:
        arguments = _arguments(target, target.base)
        base = _config_of_base(arguments, target)
        refuse_other_keys(base, *arguments)
        if config is not None:
            _refuse_other_shape(config, base, target)
            _refuse_other_tokens(tokenizer, target)
        config = base if config is None else config
    _refuse_no_memory(config, target, device, at_once)


def load_base(target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    """The base in the dtype of the model, with as many rows of tokens as the model's tokenizer has."""
    model = _load(target, target.base)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        print(
            f"the base has {rows:,} rows for {len(tokenizer):,} tokens: it gets the others, untrained, as its run gave "
            "them to it",
            flush=True,
        )
        model.resize_token_embeddings(len(tokenizer))
    return _ready(model, target, tokenizer, device)


def load_tuned(target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    """The model; an adapter on its base."""
    if not target.is_adapter:
        return _ready(_load(target, str(target.folder), is_saved=True), target, tokenizer, device)
    from peft import PeftModel

    base = _load(target, target.base)
    rows = embedding_rows(entries_of(target.folder), base)
    if rows is not None:
        base.resize_token_embeddings(rows, mean_resizing=False)  # the adapter brings what stands in them
    widened = target.adapter_dtype == "float32"
    model = PeftModel.from_pretrained(base, str(target.folder), autocast_adapter_dtype=widened)
    return _ready(model, target, tokenizer, device)


def forget(device: str) -> None:
    """What nobody names any more leaves the memory, of the GPU too."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _config_of_base(arguments: tuple, target: Target) -> PretrainedConfig:
    try:
        return load_config(*arguments[:2])
    except Refusal as error:
        raise refusal(
            "ZR794",
            base=target.base,
            why=error.why,
            fix=": an adapter needs it." if target.is_adapter else ", --base none asks the model alone.",
        ) from error


def _load(target: Target, name: str, is_saved: bool = False) -> PreTrainedModel:
    arguments = _arguments(target, name, is_saved)
    return load_model(load_config(*arguments[:2]), *arguments)


def _ready(model, target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    return Loaded(model.to(device).eval(), tokenizer, device, target.autocast)


def _arguments(target: Target, name: str, is_saved: bool = False) -> tuple:
    """(model_args, training_args, ours) as zero_recipes.model reads them. `name`: the folder or name to load."""
    settings = target.settings.as_dict()
    own = dict(settings["model_init_kwargs"] or {})
    for key in ("dtype", "torch_dtype", "device_map", "quantization_config"):
        own.pop(key, None)
    changes = {"model_name_or_path": name, "dtype": target.dtype, "model_init_kwargs": own or None}
    if is_saved or not target.draws_base or name != target.base:
        changes |= {"random_weights": False}
    if is_saved or name != target.settings.model_name_or_path:
        changes |= {"model_revision": "main"}
    values = SimpleNamespace(**(settings | changes))
    return values, values, values


def _refuse_other_shape(config: PretrainedConfig, base: PretrainedConfig, target: Target) -> None:
    ours, theirs = config.get_text_config(), base.get_text_config()
    for key in _SHAPE:
        mine, other = getattr(ours, key, None), getattr(theirs, key, None)
        if mine != other:
            raise refusal("ZR789", base=target.base, folder=target.folder, key=key, other=other, mine=mine)


def _refuse_other_tokens(tokenizer: PreTrainedTokenizerBase, target: Target) -> None:
    """Prompts are written with the model's tokenizer: every token that the base knows has the same id there."""
    if not any((Path(target.base) / name).is_file() for name in _TOKENIZER) and Path(target.base).is_dir():
        return
    base = _read_tokenizer(target.base, target.settings.trust_remote_code)
    known = tokenizer.get_vocab()
    other = sorted(token for token, number in base.get_vocab().items() if known.get(token) != number)
    if other:
        raise refusal("ZR790", base=target.base, folder=target.folder, number_of_other=len(other), first_other=other[0])


def _read_tokenizer(place: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library's parsers raise what they like
        raise refusal("ZR791", place=place, error=first_line(error)) from error


def _refuse_no_memory(config: PretrainedConfig, target: Target, device: str, at_once: int) -> None:
    sizes = parameter_sizes(config, target.settings.trust_remote_code)
    dtype = str(config.dtype).removeprefix("torch.") if target.dtype == "auto" else target.dtype
    needed = at_once * sum(sizes or []) * _BYTES.get(dtype, 2)
    free, where = Host().memory() if device == "cpu" else (torch.cuda.mem_get_info()[0], "the GPU")
    if needed > free:
        raise refusal(
            "ZR792",
            folder=target.folder,
            size=units.size(needed),
            size_2=units.size(free),
            where=where,
            at_once=at_once,
            why="s" if at_once > 1 else "",
            sum=sum(sizes),
            dtype=dtype,
            fix="." if device == "cpu" else "; CUDA_VISIBLE_DEVICES= asks on the CPU.",
        )
