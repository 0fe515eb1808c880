"""Master weights and optimizer states in 16 bits, and torch's autocast by the ds_config: what goes with what.

File names are those of DeepSpeed 0.19.8, under deepspeed/.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding

ADAM_BLOCK = '"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}'
ADAMS = ("adam", "adamw")  # those of a ds_config's optimizer block that become DeepSpeedCPUAdam

MOSTLY_LOST = 1e-4  # learning rates up to here: benchmarks/results/bf16_states.json


def low_precision_findings(config: DsConfig, settings: Settings) -> list[Finding]:
    """`settings`: the recipe's keys in force. What DeepSpeed's parser itself refuses is found by ds_parser.py."""
    return [*_masters(config, settings), *_fp16_masters(config), *_autocast(config, settings)]


def _masters(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    if not config.bf16_masters:
        return
    if settings.precision != "bf16":
        yield finding("ZR274", precision=settings.precision)
    if settings.learning_rate <= MOSTLY_LOST:
        yield finding("ZR294", learning_rate=settings.learning_rate)
    if "nvme" in (config.offload_optimizer, config.offload_param):
        yield finding("ZR287")
    elif not config.bf16_states and not (config.offload_optimizer and _is_cpu_adam(config, settings)):
        yield finding(
            "ZR275", what="" if config.offload_optimizer is None else ", offloaded with another optimizer than Adam"
        )
    elif config.bf16_states and config.offload_optimizer and not _is_block_adam(config):
        yield finding("ZR276", adam_block=ADAM_BLOCK)


def _is_block_adam(config: DsConfig) -> bool:
    block = config.optimizer or {}
    return str(block.get("type")).lower() in ADAMS and not (block.get("params") or {}).get("torch_adam")


def _is_cpu_adam(config: DsConfig, settings: Settings) -> bool:
    if config.optimizer is not None:
        return _is_block_adam(config)
    forced = config.raw.get("zero_force_ds_cpu_optimizer", True)
    return bool(forced) and str(getattr(settings.optim, "value", settings.optim)).startswith("adamw_torch")


def _fp16_masters(config: DsConfig) -> Iterator[Finding]:
    if (config.raw.get("fp16") or {}).get("fp16_master_weights_and_grads"):
        yield finding("ZR277")


def _autocast(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    block = config.raw.get("torch_autocast") or {}
    if not block.get("enabled"):
        return
    if settings.precision != "fp32":
        yield finding("ZR278", precision=settings.precision)
    if block.get("dtype") is None:
        yield finding("ZR279")
    elif config.autocast == "fp16":
        yield finding("ZR280")
    if config.quantizes_weights:
        yield finding("ZR282")
    missing = [name for name in block.get("lower_precision_safe_modules") or () if not _is_class(name)]
    if missing:
        yield finding("ZR281", missing=", ".join(map(str, missing)))


def _is_class(name: object) -> bool:
    module, _, attribute = str(name).rpartition(".")
    try:
        return isinstance(getattr(importlib.import_module(module), attribute), type)
    except (ImportError, AttributeError, ValueError):
        return False
