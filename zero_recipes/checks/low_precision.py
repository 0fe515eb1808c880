"""Master weights and optimizer states in 16 bits, and torch's autocast by the ds_config: what goes with what.

File names are those of DeepSpeed 0.19.8, under deepspeed/.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from zero_recipes.config.ds_view import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Finding

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
        yield Finding(
            "ZR274",
            f"bf16.bf16_master_weights_and_grads in a run in {settings.precision}",
            "DeepSpeed reads it whether or not bf16 is enabled (runtime/engine.py, bf16_master_weights_and_gradients): "
            f"weights in {settings.precision} would be written over with masters in bf16 after every step.",
            "Set bf16: true in the recipe, or remove it.",
        )
    if settings.learning_rate <= MOSTLY_LOST:
        yield Finding(
            "ZR294",
            f"bf16.bf16_master_weights_and_grads with learning_rate {settings.learning_rate:g}",
            "A weight in bf16 has 8 bits: a step smaller than about 1/256 of it is lost, and Adam's steps are about as "
            "large as the learning rate. In the demo a fifth of what fp32 masters learn was lost at 1e-4, and most of "
            "it at 2e-5 (docs/precision.md).",
            "Keep the masters in fp32 (accelerate_configs/zero3.yaml, zero2_offload.yaml), or compare the losses of a "
            "short run with theirs first.",
            level="warning",
        )
    if "nvme" in (config.offload_optimizer, config.offload_param):
        yield Finding(
            "ZR287",
            "bf16.bf16_master_weights_and_grads with states on NVMe",
            "runtime/swap_tensor sizes its buffers by the masters' dtype; with states of another one it was never "
            "compared with a run in memory.",
            'Offload to the CPU ("device": "cpu"), or remove it.',
        )
    elif not config.bf16_states and not (config.offload_optimizer and _is_cpu_adam(config, settings)):
        yield Finding(
            "ZR275",
            "bf16.bf16_master_weights_and_grads without bf16_optimizer_states"
            + ("" if config.offload_optimizer is None else ", offloaded with another optimizer than Adam"),
            'runtime/zero/stage_1_and_2.py and stage3.py: "Master weights feature requires ZeRO Offload with '
            'DeepSpeedCPUAdam", once the model is loaded: only that one keeps fp32 states beside bf16 masters.',
            'Set "bf16_optimizer_states": true, or offload the optimizer to the CPU with optim: adamw_torch.',
        )
    elif config.bf16_states and config.offload_optimizer and not _is_block_adam(config):
        yield Finding(
            "ZR276",
            "bf16.bf16_optimizer_states with offload_optimizer, and no Adam in the ds_config",
            "accelerate (utils/deepspeed.py, map_pytorch_optim_to_deepspeed) makes DeepSpeedCPUAdam with fp32 states "
            "of the recipe's optimizer; DeepSpeed (runtime/base_optimizer.py, _configure_master_weights) stops on it "
            "once the model is loaded.",
            f"Let DeepSpeed make it: add {ADAM_BLOCK} to the ds_config; or remove bf16_optimizer_states, and the "
            "states stay in fp32 in host memory.",
        )


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
        yield Finding(
            "ZR277",
            "fp16.fp16_master_weights_and_grads",
            "Masters in fp16 hold 11 bits: a step smaller than 1/2048 of a weight is lost. DeepSpeed takes it with "
            "ZeRO-Offload and DeepSpeedCPUAdam alone, and there it was never compared with other runs here.",
            'Remove it; in bf16 runs "bf16_master_weights_and_grads" with "bf16_optimizer_states" saves more.',
        )


def _autocast(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    block = config.raw.get("torch_autocast") or {}
    if not block.get("enabled"):
        return
    if settings.precision != "fp32":
        yield Finding(
            "ZR278",
            f"torch_autocast with {settings.precision}: true",
            f"autocast is made for fp32 weights; {settings.precision} makes them 16-bit ones, and the run would be "
            "neither (runtime/engine.py casts the model, and runtime/torch_autocast.py casts once more).",
            'Set bf16: false in the recipe and "bf16": {"enabled": "auto"} in the ds_config, or remove torch_autocast.',
        )
    if block.get("dtype") is None:
        yield Finding(
            "ZR279",
            "torch_autocast without a dtype",
            "torch.autocast takes fp16 on GPUs then, without scaling the loss, and gradients are reduced by no dtype "
            "(runtime/torch_autocast.py, get_comm_dtype).",
            'Add "dtype": "bfloat16".',
        )
    elif config.autocast == "fp16":
        yield Finding(
            "ZR280",
            "torch_autocast in fp16",
            "The loss is scaled by torch's GradScaler, and gradients are clipped before they are scaled back "
            "(runtime/zero/stage_1_and_2.py and stage3.py, unscale_and_clip_grads knows DeepSpeed's own scale alone).",
            'Write "dtype": "bfloat16", or use fp16: true without torch_autocast.',
        )
    if config.quantizes_weights:
        yield Finding(
            "ZR282",
            "torch_autocast with zero_quantized_weights",
            'runtime/torch_autocast.py: "Cannot enable both torch autocast and zero quantized weights", once the model '
            "is loaded.",
            "Remove one of them.",
        )
    missing = [name for name in block.get("lower_precision_safe_modules") or () if not _is_class(name)]
    if missing:
        yield Finding(
            "ZR281",
            f"torch_autocast.lower_precision_safe_modules names no class: {', '.join(map(str, missing))}",
            'runtime/torch_autocast.py: "Failed to import lower precision safe module", once the model is loaded.',
            'Write whole names, such as "torch.nn.Linear", or remove the key: that is its default, with convolutions.',
        )


def _is_class(name: object) -> bool:
    module, _, attribute = str(name).rpartition(".")
    try:
        return isinstance(getattr(importlib.import_module(module), attribute), type)
    except (ImportError, AttributeError, ValueError):
        return False
