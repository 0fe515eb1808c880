"""The configurations of a recipe's model and of its adapter."""

from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import refusal
from zero_recipes.core.library_errors import absent_model_as_finding, library_error_as_finding

ALL_LINEAR = "all-linear"  # PEFT 0.21, utils/constants.py
# entries of a config.json that say nothing of the model
NOTES = ("transformers_version", "_name_or_path", "_commit_hash")


def load_config(settings: Settings) -> PretrainedConfig:
    """Read the configuration of a recipe's model, from a folder, the cache or the Hub. Raises Refusal."""
    name = settings.model_name_or_path
    if name is None:
        raise refusal("ZR401")
    trust = settings.trust_remote_code
    with library_error_as_finding(f"reading the configuration of {name}"), absent_model_as_finding(name):
        return AutoConfig.from_pretrained(name, revision=settings.model_revision, trust_remote_code=trust)


def config_of_file(settings: Settings) -> dict[str, Any] | None:
    """The model's config.json as it is written, without notes; None where it is not at hand."""
    try:
        written, _ = PretrainedConfig.get_config_dict(settings.model_name_or_path, revision=settings.model_revision)
    except (OSError, ValueError, TypeError):  # load_config has refused it
        return None
    return {key: value for key, value in written.items() if key not in NOTES}


def adapter_config(settings: Settings, has_weights: bool = False) -> Any:
    """The PeftConfig of TRL's keys, with those of `peft_config` over them; None without `use_peft`.

    Without `has_weights` no start of the adapter is computed from the model's weights.

    TRL 1.16 (trainer/model_config.py) makes a text of a list with one name: "all-linear", or what PEFT takes for a
    pattern that the module's whole name must match. `lora_target_modules: [q_proj]` would match none.
    """
    import peft
    from trl import ModelConfig, get_peft_config

    known = ModelConfig.__dataclass_fields__
    of_trl = {key: value for key, value in settings.as_dict().items() if key in known}
    config = get_peft_config(ModelConfig(**of_trl))
    if config is None:
        return None
    values = config.to_dict()
    if isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        values["target_modules"] = [config.target_modules]
    own = dict(settings.peft_config or {})
    if own.get("peft_type", "LORA") != "LORA":
        values = {key: values[key] for key in ("task_type", "target_modules", "modules_to_save")}
    if not has_weights:
        own.pop("init_lora_weights", None)
    return peft.get_peft_config(values | own)


def takes_all_linear(adapter: Any) -> bool:
    """Whether an adapter's configuration asks for every linear layer, by PEFT's word for it."""
    targets = adapter.target_modules
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def loading_keywords(settings: Settings) -> dict[str, Any]:
    """What the recipe hands to `from_pretrained` and `from_config` beside a model's name."""
    dtype = settings.dtype
    if dtype not in ("auto", None):
        dtype = getattr(torch, dtype)
    keywords = {"dtype": dtype, "attn_implementation": settings.attn_implementation}
    return keywords | (settings.model_init_kwargs or {})


def quantization_of(settings: Settings, config: PretrainedConfig) -> Any:
    """The quantization that the recipe asks for, else the one that the model's files have; None without."""
    from trl import get_quantization_config

    return get_quantization_config(settings) or getattr(config, "quantization_config", None)
