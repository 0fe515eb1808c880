"""Which FSDP2 configuration is in force, from `accelerate launch` or the recipe; what of it cannot run is refused.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from zero_recipes.config.accelerate import is_fsdp1, is_on
from zero_recipes.config.ds_config import quiet, read_json_mapping
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding, raise_errors, refusal
from zero_recipes.core.library_errors import library_error_as_finding

# what `accelerate launch` sets (utils/launch.py), and its key of transformers' `fsdp_config` (training_args.py,
# _process_fsdp_args)
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
# FSDP1's words for `fsdp`: FSDP2's key and value
_WORDS: dict[str, tuple[str, Any]] = {
    "full_shard": ("reshard_after_forward", True),
    "shard_grad_op": ("reshard_after_forward", False),
    "auto_wrap": ("auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    "offload": ("cpu_offload", True),
}
_RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # FSDP1's strategies that free gathered weights after forward


def fsdp_config_in_force(settings: Settings, environment: Mapping[str, str], world_size: int) -> dict[str, Any] | None:
    """Decide the `fsdp_config` of a run; None without FSDP. Raises Refusal for what this repository cannot run.

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

    raise_errors(list(_unknown_words(environment)))
    as_it_runs = dict(environment)
    if is_fsdp1(environment):
        as_it_runs |= _as_fsdp2(environment)
    doing = "reading the accelerate file's fsdp_config"
    with library_error_as_finding(doing), quiet(), patch_environment(**as_it_runs):
        FullyShardedDataParallelPlugin()
    config = dict(_DEFAULTS)
    for name, key in _VARIABLES.items():
        if name in as_it_runs:
            config[key] = yaml.safe_load(as_it_runs[name])
        if config.get(key) in (None, "none", "None"):  # the default too
            config.pop(key, None)
    if "auto_wrap_policy" in config:
        config["auto_wrap_policy"] = config["auto_wrap_policy"].upper()  # transformers takes no other, accelerate does
    return config


def _as_fsdp2(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an FSDP1 file that FSDP2 reads otherwise.

    accelerate's FSDP1 asks for a GPU where the ranks synchronize their weights, which FSDP2 does by itself.
    """
    strategy = _word(environment.get("FSDP_SHARDING_STRATEGY", "1"), "FSDP_SHARDING_STRATEGY")
    return {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": str(strategy in _RESHARDING).lower(),
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",  # FSDP2 has no LOCAL_STATE_DICT
    }


def _known_words() -> dict[str, list[str]]:
    """{variable: accelerate's words for it, in the order of their numbers}."""
    from accelerate.utils import constants

    return {
        "FSDP_SHARDING_STRATEGY": constants.FSDP_SHARDING_STRATEGY,
        "FSDP_BACKWARD_PREFETCH": constants.FSDP_BACKWARD_PREFETCH,
        "FSDP_STATE_DICT_TYPE": constants.FSDP_STATE_DICT_TYPE,
        "FSDP_AUTO_WRAP_POLICY": constants.FSDP_AUTO_WRAP_POLICY,
    }


def _word(text: str, variable: str) -> str:
    """`text` as accelerate's word: files of old versions have its number."""
    words = _known_words()[variable]
    if text.isdigit() and 1 <= int(text) <= len(words):
        return words[int(text) - 1]
    return text.upper()


def _unknown_words(environment: Mapping[str, str]) -> Iterator[Finding]:
    """accelerate answers an unknown one with `KeyError: 'AUTO'`, some only after the weights are loaded."""
    for variable, words in _known_words().items():
        if variable == "FSDP_SHARDING_STRATEGY" and not is_fsdp1(environment):
            continue  # FSDP2 does not read it
        text = environment.get(variable, words[0])
        if _word(text, variable) not in words:
            yield finding("ZR368", key=variable.lower(), value=text, known=", ".join(words))


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
