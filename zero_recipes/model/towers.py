"""Composite models: a text model, and beside it towers for images or sound that rows of text never reach.

Such a checkpoint is loaded whole, its text model is trained, and it is saved whole under its class's names. Everything
here comes from the class and its modules: transformers 5.23 names the text model by `get_decoder`.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.utils import (
    FEATURE_EXTRACTOR_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from zero_recipes.model.config import takes_all_linear

# what AutoProcessor reads beside a tokenizer; some of these names are the same
PROCESSOR_FILES = sorted({PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, FEATURE_EXTRACTOR_NAME, VIDEO_PROCESSOR_NAME})


def auto_class(config: PretrainedConfig) -> Any:
    """The auto class that makes all of a configuration's model, with the towers of a composite one.

    AutoModelForCausalLM makes some composite models whole (Gemma 3), the text part of others (Qwen3.5), whose towers a
    save would lose, and others not at all (Mistral 3).
    """
    has_own_code = AutoModelForCausalLM.__name__ in (getattr(config, "auto_map", None) or {})
    is_two_sided = getattr(config, "is_encoder_decoder", False)
    if has_own_code or not has_text_part(config) or is_two_sided:
        return AutoModelForCausalLM
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        is_whole = causal.config_class is kind
        if is_whole or causal.__name__ in (config.architectures or ()):
            return AutoModelForCausalLM
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def has_text_part(config: PretrainedConfig) -> bool:
    """Whether a configuration has another one for its text: it is that of a composite model."""
    return config.get_text_config() is not config


def tower_names(model: torch.nn.Module) -> list[str]:
    """What rows of text never reach, by the topmost name: "model.vision_tower", "model.multi_modal_projector".

    All but the decoder, the embedding and the head of a composite model; modules, and parameters that no module of
    theirs has around them. Empty of any other model, and where the class does not say which module is its decoder.

    Args:
        model: with or without an adapter, on whichever device. The names are those that it has for them.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not has_text_part(base.config):
        return []
    try:
        text = [base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings()]
    except Exception:  # a class may have no such parts, and raises as it likes
        return []
    if text[0] is None or text[0] is base:
        return []
    reached = {id(p) for part in text if part is not None for p in part.parameters()}
    return list(_outside(model, "", reached))


def _outside(module: torch.nn.Module, name: str, reached: set[int]) -> Iterator[str]:
    """Names of the topmost modules and parameters below `module` with none of the parameters in `reached`."""
    for own, p in module.named_parameters(prefix=name, recurse=False):
        if id(p) not in reached:
            yield own
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
        inside = {id(p) for p in child.parameters()}
        if not inside:
            continue
        if inside.isdisjoint(reached):
            yield path
        elif not inside <= reached:
            yield from _outside(child, path, reached)


def is_within(name: str, towers: list[str]) -> bool:
    """Whether a parameter or module belongs to one of the towers, or is one."""
    return any(name == tower or name.startswith(f"{tower}.") for tower in towers)


def freeze_towers(model: PreTrainedModel) -> None:
    """Freeze what text never reaches.

    It has no gradients, but ZeRO's optimizers take zeros for them: weight decay would shrink a tower step by step.
    """
    towers = tower_names(model)
    for name, p in model.named_parameters():
        if is_within(name, towers):
            p.requires_grad_(False)


def spare_towers(adapter: Any, model: PreTrainedModel | None) -> Any:
    """Return an adapter's configuration that leaves the towers out, unless the recipe itself names what is adapted.

    "all-linear" are the linear layers that text reaches; so are the modules that PEFT chooses where nothing is named.

    Args:
        adapter: a PeftConfig, which is not changed; None without an adapter.
        model: the base, on whichever device; None where it is not at hand.
    """
    if adapter is None or model is None or not hasattr(adapter, "exclude_modules"):
        return adapter
    is_chosen_here = getattr(adapter, "target_modules", None) is None or takes_all_linear(adapter)
    towers = tower_names(model)
    if not towers or not is_chosen_here or getattr(adapter, "target_parameters", None):
        return adapter
    spared = copy.copy(adapter)
    spared.exclude_modules = excluding(towers, adapter.exclude_modules)
    return spared


def excluding(towers: list[str], others: Any = None) -> str:
    """The `exclude_modules` for PEFT that leaves the towers out, beside `others`: a pattern, or a list of names."""
    patterns = [f"({'|'.join(map(re.escape, towers))})(\\..*)?"]
    if isinstance(others, str):
        patterns.append(f"({others})")
    elif others:
        patterns.append(f"(.*\\.)?({'|'.join(map(re.escape, sorted(others)))})")
    return "|".join(patterns)


def processor_files(config: PretrainedConfig, name: str, revision: str | None = None) -> list[Path]:
    """The files of a composite model that say how images and sound become tokens, as far as they are at hand.

    Whoever serves a saved model looks for them beside its tokenizer. Empty of any other model.

    Args:
        config: the model's configuration.
        name: its folder, or its name on the hub, from which small files are downloaded where they are not in the cache.
        revision: of the hub's files.
    """
    if not has_text_part(config):
        return []
    found = []
    for file in PROCESSOR_FILES:
        path = cached_file(
            name,
            file,
            revision=revision or "main",
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            found.append(Path(path))
    return found
