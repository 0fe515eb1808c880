"""transformers' own constructors, called as a recipe asks.

They write dtype and attention into the configuration that they are given (5.23): here it is always a copy.
A composite model is whole, and what text never reaches is frozen.
"""

import copy
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.config.settings import Settings
from zero_recipes.engine.faults.stage_3_saved_names import forget_unused_renamings
from zero_recipes.engine.huggingface import without_deepspeed_announcement
from zero_recipes.model.config import loading_keywords
from zero_recipes.model.towers import auto_class, freeze_towers


def build_on_meta(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a configuration's model without weights, on the meta device. Raises what its class raises."""
    with torch.device("meta"), without_deepspeed_announcement():  # one rank alone may build it
        model = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    freeze_towers(model)
    return model


def built_or_none(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel | None:
    """A configuration's model without weights, of one's own. None where its class raises."""
    try:
        return build_on_meta(config, trust_remote_code)
    except Exception:  # a model's own code may raise anything
        return None


def from_config(config: PretrainedConfig, settings: Settings) -> PreTrainedModel:
    """Build a model with the weights of its constructor, in the recipe's dtype."""
    keywords = loading_keywords(settings)
    if keywords["dtype"] == "auto":  # from_config does not know it
        keywords["dtype"] = config.dtype or torch.float32
    model = auto_class(config).from_config(
        copy.deepcopy(config), trust_remote_code=settings.trust_remote_code, **keywords
    )
    freeze_towers(model)
    return model


def from_pretrained(config: PretrainedConfig, settings: Settings, **more: Any) -> tuple[PreTrainedModel, dict]:
    """Load a model as the recipe asks. Returns (the model, transformers' report on its keys).

    With `device_map="meta"` no weight is read.
    """
    from trl import get_quantization_config

    keywords = loading_keywords(settings) | more
    quantization = get_quantization_config(settings)
    if quantization is not None:
        keywords["quantization_config"] = quantization
    keywords["ignore_mismatched_sizes"] = True  # refused by name instead
    model, report = auto_class(config).from_pretrained(
        settings.model_name_or_path,
        config=copy.deepcopy(config),
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        output_loading_info=True,
        **keywords,
    )
    forget_unused_renamings(model)
    freeze_towers(model)
    return model, report
