"""Which FSDP2 configuration is in force, from `accelerate launch` or the recipe; what of it cannot run is refused.

File names are those of accelerate 1.15, transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Finding, Refusal, first_line

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


# where a file says nothing: accelerate's own default (utils/dataclasses.py, FullyShardedDataParallelPlugin), written
# out wherever transformers has another one
_DEFAULTS = {"version": 1, "auto_wrap_policy": "NO_WRAP"}


_FILE = "accelerate_configs/fsdp2.yaml"


def fsdp_config_in_force(settings: Settings, environment: Mapping[str, str], world_size: int) -> dict[str, Any] | None:
    """The `fsdp_config` in force; None without FSDP.

    One path for every launcher: `accelerate launch` hands it over through the environment (FSDP_*), torchrun through
    the recipe's keys `fsdp` and `fsdp_config`. Raises Refusal for what this repository cannot run.
    """
    launched, named = _from_launcher(environment), _from_recipe(settings)
    if launched is not None and named is not None and launched != named:
        raise Refusal(
            "ZR310",
            "two FSDP configurations: the recipe has one, the accelerate file another",
            f"transformers would take the recipe's {named} and fill its gaps from the launcher's {launched}.",
            "Remove `fsdp:` and `fsdp_config:` from the recipe or the command line, or launch with torchrun.",
        )
    config = named if launched is None else launched
    if config is None:
        return None
    config = config | _changed(config)
    findings = _findings(config, settings, world_size)
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" or settings.deepspeed:
        findings.append(
            Finding(
                "ZR311",
                "FSDP and DeepSpeed at once",
                "Both would shard the same parameters; transformers (trainer.py, `if args.fsdp`) stops on it.",
                f"Remove one: {_FILE} without `deepspeed:`, or accelerate_configs/zero3.yaml without `fsdp:`.",
            )
        )
    if findings:
        raise Refusal.of(findings)
    return config


def change_findings(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What of the FSDP configuration is run in another way than it says: one warning for each."""
    config = _from_launcher(environment) or _from_recipe(settings) or {}
    changed = _changed(config)
    if "state_dict_type" in changed:
        yield Finding(
            "ZR317",
            f"fsdp state_dict_type {config['state_dict_type']}: run as FULL_STATE_DICT",
            "transformers (trainer.py, save_model) would save no model at all under it, silently.",
            "Nothing needs to be done; FULL_STATE_DICT says what happens.",
            level="warning",
        )
    if "cpu_ram_efficient_loading" in changed:
        yield Finding(
            "ZR319",
            "FSDP with cpu_ram_efficient_loading: run without it",
            "Only rank 0 would read the weights, and the others hold empty ones (transformers, modeling_utils.py): "
            "that a model begins with its checkpoint's weights could not be checked on them. Each process reads the "
            "weights into the host's memory, one model for each process of a machine.",
            "Nothing needs to be done; fsdp_cpu_ram_efficient_loading: false says what happens.",
            level="warning",
        )


def _changed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are run with another value, which trains the same."""
    changed: dict[str, Any] = {}
    if str(config.get("state_dict_type", "FULL_STATE_DICT")).upper() != "FULL_STATE_DICT":
        changed["state_dict_type"] = "FULL_STATE_DICT"
    if config.get("cpu_ram_efficient_loading"):
        changed["cpu_ram_efficient_loading"] = False
    return changed


def _from_launcher(environment: Mapping[str, str]) -> dict[str, Any] | None:
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    given = {key: _value(environment[name]) for name, key in _VARIABLES.items() if name in environment}
    return {key: value for key, value in (_DEFAULTS | given).items() if value is not None}


def _value(text: str) -> Any:
    """A value as `accelerate launch` writes it into the environment."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", ""):
        return None
    return int(text) if text.isdigit() else text


def _from_recipe(settings: Settings) -> dict[str, Any] | None:
    requested, config = settings.fsdp, settings.fsdp_config
    if str(requested).lower() in ("none", "false", "[]", ""):
        return None
    if str(requested).lower() != "true":
        raise Refusal(
            "ZR312",
            f"fsdp: {requested}",
            "Values such as full_shard are FSDP1's; transformers (training_args.py, _apply_legacy_fsdp_to_config) "
            "still reads them, and warns that it will not for long.",
            "Write fsdp: true, and what differs from the defaults under fsdp_config.",
        )
    if isinstance(config, str):
        config = _read(config)
    return {"version": 2} | {key.removeprefix("fsdp_"): value for key, value in (config or {}).items()}


def _read(text: str) -> dict[str, Any]:
    """An `fsdp_config` that is named by its file or written as JSON."""
    try:
        config = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
        if isinstance(config, dict):
            return config
        fault = "It is not a mapping."
    except (OSError, ValueError) as error:
        fault = f"{first_line(error)}."
    raise Refusal(
        "ZR313",
        f"fsdp_config {text} cannot be read",
        fault,
        f"Write a mapping into the recipe, with keys of {', '.join(_VARIABLES.values())}; or leave it out.",
    )


def _findings(config: Mapping[str, Any], settings: Settings, world_size: int) -> list[Finding]:
    """What of an `fsdp_config` cannot run here."""
    found = []

    def add(code: str, what: str, why: str, fix: str) -> None:
        found.append(Finding(code, what, why, fix))

    if config.get("version") != 2:
        add(
            "ZR314",
            "FSDP1 (fsdp_version 1, accelerate's default where the file names none)",
            "transformers 5.20 is to drop it (training_args.py, _process_fsdp_args). It flattens the parameters of a "
            "layer into one, and nothing here reads those.",
            f"zero-recipes check RECIPE.yaml --config_file FILE --upgrade writes the file for FSDP2; {_FILE} is one.",
        )
    unknown = sorted(set(config) - set(_VARIABLES.values()))
    if unknown:
        add(
            "ZR315",
            f"fsdp_config with {', '.join(unknown)}",
            "transformers (training_args.py, _process_fsdp_args) reads no such key for FSDP2, and does not say so.",
            f"Remove it; the keys are {', '.join(sorted(_VARIABLES.values()))}.",
        )
    if world_size == 1:
        add(
            "ZR316",
            "FSDP with one process",
            "Nothing can be sharded over one process; transformers (trainer.py, `Using fsdp only works in "
            "distributed training`) stops on it, or trains without it.",
            "Launch with --num_processes 2 or more; for one process leave FSDP out.",
        )
    if config.get("cpu_offload"):
        add(
            "ZR318",
            "FSDP with its parameters offloaded to the CPU",
            "Gradient norms and clipping are then reduced on CPU tensors, and the process group of a GPU run has nccl "
            "alone (torch/distributed/fsdp/_fully_shard/_fsdp_api.py, CPUOffloadPolicy). Not measured here.",
            "Write fsdp_offload_params: false, or offload by ZeRO: accelerate_configs/zero3_offload.yaml.",
        )
    if config.get("activation_checkpointing") and settings.activation_checkpointing:
        add(
            "ZR320",
            "activation_checkpointing twice: by FSDP and by the recipe",
            "transformers (trainer.py, create_accelerator_and_postprocess) stops on it, after loading the model.",
            "Write fsdp_activation_checkpointing: false; the recipe's is the same under every strategy.",
        )
    if settings.auto_find_batch_size:
        add(
            "ZR321",
            "auto_find_batch_size under FSDP2",
            "For a smaller batch transformers (trainer.py, _update_auto_batch_size) unwraps the model, and FSDP2 has "
            "no wrapper to take off: what is sharded stays so.",
            "Set per_device_train_batch_size by hand.",
        )
    if settings.load_best_model_at_end and settings.save_only_model:
        add(
            "ZR322",
            "save_only_model with load_best_model_at_end under FSDP",
            "transformers (trainer.py, create_accelerator_and_postprocess) stops on it, after loading the model.",
            "Set save_only_model: false.",
        )
    return found
