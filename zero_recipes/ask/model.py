"""A saved model or adapter and its base, each loaded as its run had it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from zero_recipes.checkpoint.saved_model import (
    ADAPTER,
    INDEX,
    SINGLE,
    NotWhole,
    compare_with_adapter,
    embedding_rows,
    entries_of,
)
from zero_recipes.checkpoint.verify import TOKENIZER, verify
from zero_recipes.config import recipe as recipes
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import first_line, library_error_as_finding, refusal
from zero_recipes.core.process import environment_kept
from zero_recipes.data.load import PADDING_TOKENS, apply_chat_template_file
from zero_recipes.metrics.schema import FILE, ContractError, Metrics
from zero_recipes.model import load_config, load_model

RECIPE = "recipe.resolved.yaml"
NO_BASE = "none"  # --base none: the model alone
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}
# keys of a recipe about its training: the process group, DeepSpeed, FSDP, the device
_ONE_PROCESS = {"deepspeed": None, "fsdp": None, "fsdp_config": None, "parallelism_config": None, "use_cpu": True}
_ONE_PROCESS |= {"bf16": False, "fp16": False, "tf32": None, "torch_compile": False, "use_liger_kernel": False}
_ONE_PROCESS |= {"accelerator_config": None, "resume_from_checkpoint": None, "report_to": "none", "packing": False}
_ONE_PROCESS |= {"load_in_4bit": False, "load_in_8bit": False, "push_to_hub": False, "padding_free": False}


@dataclass(frozen=True)
class Target:
    """A saved model, ready to be loaded."""

    folder: Path
    is_adapter: bool
    base: str | None  # None: the model answers alone
    recipe: Recipe  # the run's own, or TRL's defaults
    settings: Settings  # of one process
    is_ours: bool  # whether the recipe is the run's own
    draws_base: bool  # the run began with random weights, and so does the base
    dtype: str  # of the weights, as torch names it; "auto": as they are saved
    autocast: str | None  # the dtype that the run computed in, where its weights are float32
    adapter_dtype: str

    @property
    def name(self) -> str:
        """The folder's name, of a checkpoint with its run's."""
        return "-".join(dict.fromkeys((_run_folder(self.folder).name, self.folder.resolve().name)))


class Loaded(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str
    autocast: str | None
    adapter_off: bool = False

    def without_adapter(self) -> Loaded:
        """The base of an adapter."""
        return self._replace(adapter_off=True)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The context that its run computed in."""
        autocast = torch.autocast(self.device, getattr(torch, self.autocast)) if self.autocast else nullcontext()
        with autocast, self.model.disable_adapter() if self.adapter_off else nullcontext():
            yield


def find_target(folder: Path, base: str | None, overrides: list[str], trust_remote_code: bool = False) -> Target:
    """The model in `folder`, whole, with its run's recipe where it has one. No weight is read.

    `base`: of the command line, `none` for no base. `overrides`: recipe keys of the command line. Code that a model
    brings runs only where `trust_remote_code` says so, whatever the recipe says. Raises Refusal.
    """
    is_adapter = (folder / "adapter_config.json").is_file()
    weights = (ADAPTER,) if is_adapter else (SINGLE, INDEX)
    if not any((folder / name).is_file() for name in weights):
        raise refusal("ZR784", folder=folder, weights=" nor ".join(weights), cwd=Path.cwd())
    recipe, is_ours = _recipe_of(folder, overrides)
    settings = recipe.settings.replace(**_ONE_PROCESS, trust_remote_code=trust_remote_code)
    name = None if base == NO_BASE else base
    if base is None and is_ours:
        name = settings.model_name_or_path
    elif base is None and is_adapter:
        name = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if is_adapter and name is None:
        raise refusal("ZR788", folder=folder)
    dtype = saved = _saved_dtype(folder, is_adapter, name, trust_remote_code)
    if is_adapter:  # DeepSpeed and FSDP turn base and adapter into 16 bit; else the recipe says the base's
        dtype = "auto" if not is_ours else saved if saved != "float32" else settings.dtype or "auto"
    return Target(
        folder=folder,
        is_adapter=is_adapter,
        base=name,
        recipe=recipe,
        settings=settings,
        is_ours=is_ours,
        draws_base=is_ours and base is None and recipe.settings.random_weights,
        dtype=dtype,
        autocast=_computed_in(folder, recipe) if is_ours and saved == "float32" else None,
        adapter_dtype=saved,
    )


def _recipe_of(folder: Path, overrides: list[str]) -> tuple[Recipe, bool]:
    """(the recipe, whether it is the run's own). What its `env:` sets is not kept: the file may be a stranger's."""
    places = (folder / RECIPE, _run_folder(folder) / RECIPE)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = next(folder / name for name in ("adapter_config.json", "config.json") if (folder / name).is_file())
        return recipes.parse_recipe(known, {"model_name_or_path": str(folder)}, overrides), False
    with environment_kept():
        return recipes.parse_recipe(path, recipes.read_recipe_file(path), overrides), True


def _is_checkpoint(folder: Path) -> bool:
    return re.fullmatch(r"checkpoint-\d+", folder.resolve().name) is not None


def _run_folder(folder: Path) -> Path:
    """The folder of the run that saved a model there."""
    return folder.resolve().parent if _is_checkpoint(folder) else folder.resolve()


def _saved_dtype(folder: Path, is_adapter: bool, base: str | None, trust_remote_code: bool) -> str:
    """The dtype of most weights; "auto" for an unusual one. Raises Refusal where the model is not whole.

    Of a checkpoint no checksums: its manifest is over the optimizer's states too.
    """
    try:
        if is_adapter:
            compare_with_adapter(folder, entries_of(folder), trust_remote_code, base)
        else:
            verify(folder, skip_checksums=_is_checkpoint(folder), trust_remote_code=trust_remote_code)
    except NotWhole as error:
        raise refusal("ZR787", folder=folder, error=first_line(error)) from error
    sizes: Counter[str] = Counter()
    for entry in entries_of(folder).values():
        sizes[entry.dtype] += entry.elements
    return _DTYPES.get(sizes.most_common(1)[0][0], "auto")


def _computed_in(folder: Path, recipe: Recipe) -> str | None:
    """The dtype that the run computed in, where it is not float32."""
    precision = recipe.settings.precision
    with suppress(ContractError):
        precision = Metrics.read(_run_folder(folder) / FILE).precision or precision
    return _COMPUTED_IN.get(precision)


def load_tokenizer(target: Target, overrides: list[str]) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model, else the base's, whose tokens must be the same. Raises Refusal."""
    is_own = any((target.folder / name).is_file() for name in TOKENIZER)
    if not is_own and target.base is None:
        raise refusal("ZR575", folder=target.folder)
    tokenizer = _read_tokenizer(str(target.folder) if is_own else target.base, target)
    if tokenizer.pad_token is None:  # masked, whatever it is
        known = tokenizer.get_vocab()
        tokenizer.pad_token = next((token for token in PADDING_TOKENS if token in known), tokenizer.eos_token)
    if is_own and target.base is not None and not target.is_adapter:
        known = tokenizer.get_vocab()
        base = _read_tokenizer(target.base, target).get_vocab() if _has_tokenizer(target.base) else {}
        others = sorted(token for token, number in base.items() if known.get(token) != number)
        if others:
            raise refusal("ZR790", base=target.base, folder=target.folder, count=len(others), example=others[0])
    if any(word.startswith("--chat_template_path") for word in overrides):  # the recipe's own is saved with the model
        tokenizer = apply_chat_template_file(tokenizer, target.settings)
    return tokenizer


def _has_tokenizer(base: str) -> bool:
    return not Path(base).is_dir() or any((Path(base) / name).is_file() for name in TOKENIZER)


def _read_tokenizer(place: str, target: Target) -> PreTrainedTokenizerBase:
    with library_error_as_finding(f"reading the tokenizer of {place}"):
        return AutoTokenizer.from_pretrained(place, trust_remote_code=target.settings.trust_remote_code)


def load_base(target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    """The base in the dtype of the model, with as many rows of tokens as the model's tokenizer has."""
    model = _load(target, target.base)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        print(f"the base has {rows:,} rows for {len(tokenizer):,} tokens: it gets the others, untrained", flush=True)
        model.resize_token_embeddings(len(tokenizer))
    return Loaded(model.to(device).eval(), tokenizer, device, target.autocast)


def load_tuned(target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    """The model; an adapter on its base."""
    model = _load(target, target.base if target.is_adapter else str(target.folder))
    if target.is_adapter:
        from peft import PeftModel

        rows = embedding_rows(entries_of(target.folder), model)
        if rows is not None:
            model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has their weights
        with library_error_as_finding(f"putting {target.folder} on its base"):
            is_wide = target.adapter_dtype == "float32"
            model = PeftModel.from_pretrained(model, str(target.folder), autocast_adapter_dtype=is_wide)
    return Loaded(model.to(device).eval(), tokenizer, device, target.autocast)


def _load(target: Target, name: str) -> PreTrainedModel:
    """The model of that folder or name, with the recipe's keys for it."""
    keywords = dict(target.settings.model_init_kwargs or {})
    for key in ("dtype", "torch_dtype", "device_map", "quantization_config"):
        keywords.pop(key, None)
    changes = {"model_name_or_path": name, "dtype": target.dtype, "model_init_kwargs": keywords or None}
    changes["random_weights"] = target.draws_base and name == target.base
    if name != target.settings.model_name_or_path:
        changes["model_revision"] = "main"
    values = target.settings.replace(**changes)
    return load_model(load_config(values), values)
