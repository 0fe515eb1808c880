"""Which FSDP2 configuration is in force, from `accelerate launch` or the recipe; what of it cannot run is refused.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from zero_recipes.config.accelerate import is_fsdp1
from zero_recipes.config.ds_config import read_json_mapping
from zero_recipes.config.recipe import Settings
from zero_recipes.core.findings import finding, library_error_as_finding, raise_errors, refusal

# transformers' `fsdp_config` (training_args.py, _process_fsdp_args) by what `accelerate launch` sets (utils/launch.py)
_VARIABLES = {
    "FSDP_VERSION": "version",
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_AUTO_WRAP_POLICY": "auto_wrap_policy",
    "FSDP_MIN_NUM_PARAMS": "min_num_params",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    "FSDP_STATE_DICT_TYPE": "state_dict_type",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "cpu_ram_efficient_loading",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
}
# where a file says nothing: accelerate's own default (FullyShardedDataParallelPlugin), if transformers has another one
_DEFAULTS = {"auto_wrap_policy": "NO_WRAP"}
# run so, whatever is written: it trains the same, and saves a whole model
_WHOLE = {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": False}
# FSDP1's words for `fsdp`, in FSDP2's keys
_WORDS = {"full_shard": {"reshard_after_forward": True}, "shard_grad_op": {"reshard_after_forward": False}}
_WORDS |= {"auto_wrap": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "offload": {"cpu_offload": True}}
_RESHARDING = ("FULL_SHARD", "HYBRID_SHARD", "1", "4")  # FSDP1's strategies that free gathered weights after forward


def fsdp_config_in_force(settings: Settings, environment: Mapping[str, str], world_size: int) -> dict[str, Any] | None:
    """The `fsdp_config` in force; None without FSDP. One path for every launcher: `accelerate launch` hands it over
    through the environment (FSDP_*), torchrun through the recipe's keys `fsdp` and `fsdp_config`. Raises Refusal for
    what this repository cannot run."""
    launched, named = _from_launcher(environment), _from_recipe(settings)
    if launched is not None and named is not None and launched != named:
        raise refusal("ZR310", named=named, launched=launched)
    config = named if launched is None else launched
    if config is None:
        return None
    config = config | {key: value for key, value in _WHOLE.items() if key in config}
    unknown = sorted(set(config) - set(_VARIABLES.values()))
    unknown += [] if config.get("version") == 2 else [f"version {config.get('version')}"]
    known = ", ".join(sorted(_VARIABLES.values()))
    findings = [finding("ZR315", unknown=", ".join(unknown), known=known)] if unknown else []
    twice = config.get("activation_checkpointing") and settings.activation_checkpointing
    findings += [finding("ZR316")] if world_size == 1 else []
    findings += [finding("ZR320")] if twice else []
    findings += [finding("ZR321")] if settings.auto_find_batch_size else []
    findings += [finding("ZR322")] if settings.load_best_model_at_end and settings.save_only_model else []
    by_deepspeed = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" or settings.deepspeed
    findings += [finding("ZR311", file="accelerate_configs/fsdp2.yaml")] if by_deepspeed else []
    raise_errors(findings)
    return config


def _from_launcher(environment: Mapping[str, str]) -> dict[str, Any] | None:
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment

    with library_error_as_finding("reading the accelerate file's fsdp_config"), patch_environment(**environment):
        FullyShardedDataParallelPlugin()
    texts = {key: environment[name] for name, key in _VARIABLES.items() if name in environment}
    written = {key: None if text.lower() in ("none", "") else yaml.safe_load(text) for key, text in texts.items()}
    if is_fsdp1(environment):
        strategy = environment.get("FSDP_SHARDING_STRATEGY", _RESHARDING[0])
        written |= {"version": 2, "reshard_after_forward": strategy in _RESHARDING}
    return {key: value for key, value in (_DEFAULTS | written).items() if value is not None}


def _from_recipe(settings: Settings) -> dict[str, Any] | None:
    requested, config = settings.fsdp, settings.fsdp_config
    if str(requested).lower() in ("none", "false", "[]", ""):
        return None
    words = requested if isinstance(requested, list) else str(requested).replace(",", " ").split()
    words = [] if str(requested).lower() == "true" else words
    if any(word not in _WORDS for word in words):
        raise refusal("ZR312", requested=requested)
    if isinstance(config, str):
        config = read_json_mapping(config)
    meant = {key: value for word in words for key, value in _WORDS[word].items()}
    return {"version": 2} | meant | {key.removeprefix("fsdp_"): value for key, value in (config or {}).items()}
