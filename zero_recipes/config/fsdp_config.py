"""Which FSDP2 configuration is in force, from `accelerate launch` or the recipe; what of it cannot run is refused.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from zero_recipes.config.accelerate import is_fsdp1, is_on
from zero_recipes.config.ds_config import read_json_mapping
from zero_recipes.config.keys import tables
from zero_recipes.config.recipe import Settings
from zero_recipes.core.findings import Finding, finding, library_error_as_finding, raise_errors, refusal

_VARIABLES = tables()["fsdp_variables"]
# where a file says nothing: accelerate's own default (FullyShardedDataParallelPlugin), if transformers has another one
_DEFAULTS = {"auto_wrap_policy": "NO_WRAP"}
# run so, whatever is written: it trains the same, and saves a whole model
_WHOLE = {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": False}
_WORDS = tables()["fsdp_words"]
_RESHARDING = ("FULL_SHARD", "HYBRID_SHARD", "1", "4")  # FSDP1's strategies that free gathered weights after forward


def fsdp_config_in_force(settings: Settings, environment: Mapping[str, str], world_size: int) -> dict[str, Any] | None:
    """The `fsdp_config` in force; None without FSDP. Raises Refusal for what this repository cannot run.

    `accelerate launch` hands it over through the environment (FSDP_*), torchrun through the recipe's keys.
    """
    launched = _from_launcher(environment)
    named = _from_recipe(settings)
    if launched is not None and named is not None and launched != named:
        raise refusal("ZR310", named=named, launched=launched)
    config = named if launched is None else launched
    if config is None:
        return None
    for key in _WHOLE.keys() & config.keys():
        config[key] = _WHOLE[key]
    raise_errors(list(_findings(config, settings, environment, world_size)))
    return config


def _findings(
    config: Mapping[str, Any], settings: Settings, environment: Mapping[str, str], world_size: int
) -> Iterator[Finding]:
    known = sorted(_VARIABLES.values())
    unknown = sorted(config.keys() - set(known))
    if config.get("version") != 2:
        unknown.append(f"version {config.get('version')}")
    if unknown:
        yield finding("ZR315", unknown=", ".join(unknown), known=", ".join(known))
    if world_size == 1:
        yield finding("ZR316")
    if config.get("activation_checkpointing") and settings.activation_checkpointing:
        yield finding("ZR320")
    if settings.auto_find_batch_size:
        yield finding("ZR321")
    if settings.load_best_model_at_end and settings.save_only_model:
        yield finding("ZR322")
    if is_on(environment, "DEEPSPEED") or settings.deepspeed:
        yield finding("ZR311", file="accelerate_configs/fsdp2.yaml")


def _from_launcher(environment: Mapping[str, str]) -> dict[str, Any] | None:
    if not is_on(environment, "FSDP"):
        return None
    from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment

    doing = "reading the accelerate file's fsdp_config"
    with library_error_as_finding(doing), patch_environment(**environment):
        FullyShardedDataParallelPlugin()
    config = dict(_DEFAULTS)
    for name, key in _VARIABLES.items():
        if name in environment:
            config[key] = yaml.safe_load(environment[name])
        if config.get(key) in (None, "none", "None"):  # the default too
            config.pop(key, None)
    if is_fsdp1(environment):
        strategy = environment.get("FSDP_SHARDING_STRATEGY", _RESHARDING[0])
        config["version"] = 2
        config["reshard_after_forward"] = strategy in _RESHARDING
    return config


def _from_recipe(settings: Settings) -> dict[str, Any] | None:
    requested = settings.fsdp
    text = str(requested).lower()
    if text in ("none", "false", "[]", ""):
        return None
    if text == "true":
        words = []
    elif isinstance(requested, list):
        words = requested
    else:
        words = str(requested).replace(",", " ").split()
    config = {"version": 2}
    for word in words:
        if word not in _WORDS:
            raise refusal("ZR312", requested=requested)
        key, value = _WORDS[word]
        config[key] = value
    written = settings.fsdp_config
    if isinstance(written, str):
        written = read_json_mapping(written)
    for key, value in (written or {}).items():
        config[key.removeprefix("fsdp_")] = value
    return config
