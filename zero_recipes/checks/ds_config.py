"""Checks of a DeepSpeed configuration against the run: what contradicts it, and what does nothing under the Trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from zero_recipes.compat.huggingface import without_deepspeed_announcement
from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Finding

# blocks that DeepSpeed 0.19.8 names outside runtime/constants.py
BLOCKS = {
    *("zero_optimization", "aio", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("elasticity", "autotuning", "compression_training", "data_efficiency", "curriculum_learning", "nebula"),
    *("hybrid_engine", "compile", "tensor_parallel", "pipeline", "expert_parallel", "torch_autocast", "checkpoint"),
    *("weight_quantization", "monitor_config", "activation_checkpointing", "bf16", "fp16", "zenflow"),
}

LOG_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def ds_config_findings(
    config: dict[str, Any], source: str, settings: Settings, world_size: int, device: str
) -> list[Finding]:
    """All findings about one DeepSpeed configuration. `settings`: the recipe's keys in force."""
    return [
        *_missing(config, source, settings),
        *_mismatches(config, source, settings, world_size),
        *_half_precision(settings, device),
        *_schedule(config, source, settings),
        *_without_effect(config, source),
    ]


def fill_auto(config: dict[str, Any], settings: Settings, world_size: int):
    """transformers' HfTrainerDeepSpeedConfig with the Trainer's values filled in, and the arguments that it was given.

    Its `mismatches` name what was written by hand and differs from the run.
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(**settings.as_dict(), world_size=world_size)
    arguments.bf16 = settings.precision == "bf16"
    arguments.get_warmup_steps = lambda steps: settings.warmup_steps
    with without_deepspeed_announcement():  # it announces itself to all; this is only a look
        filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(arguments)
    return filled, arguments


def _missing(config: dict, source: str, settings: Settings) -> Iterator[Finding]:
    """What the run needs and the configuration leaves out: DeepSpeed would stop, or do without it in silence."""
    auto, enabled = '"auto"', '{"enabled": "auto"}'
    needs = {"zero_optimization": ("accelerate stops without it", '{"stage": 2}')}
    if "train_batch_size" not in config:
        needs["train_micro_batch_size_per_gpu"] = ("DeepSpeed stops without it", auto)
    if settings.gradient_accumulation_steps > 1:
        needs["gradient_accumulation_steps"] = ("DeepSpeed would step after every micro batch", auto)
    if settings.max_grad_norm > 0:
        limit = settings.max_grad_norm
        needs["gradient_clipping"] = (f"DeepSpeed would not clip; the recipe's max_grad_norm is {limit}", auto)
    block = settings.precision
    if block != "fp32":
        needs[block] = (f"DeepSpeed would train in fp32, the recipe says {block}", enabled)
    for key, (why, written) in needs.items():
        if key not in config:
            yield Finding("ZR213", f"{source} has no {key}", f"{why}.", f'Add "{key}": {written}.')


def _mismatches(config: dict, source: str, settings: Settings, world_size: int) -> Iterator[Finding]:
    """What transformers itself would stop on (integrations/deepspeed.py), but only once the model is loaded."""
    for mismatch in fill_auto(config, settings, world_size)[0].mismatches:
        written, _, wanted = mismatch.removeprefix("- ds ").partition(" vs hf ")
        key = written.partition("=")[0]
        yield Finding(
            "ZR214",
            f"{source} has {written}, the run has {wanted}",
            "transformers stops on the difference, after the model has been loaded.",
            f'Write "auto" for {key}: the recipe and the number of processes decide.',
        )


def _half_precision(settings: Settings, device: str) -> Iterator[Finding]:
    if settings.fp16 and device == "cpu":
        yield Finding(
            "ZR215",
            "fp16 on a CPU",
            'DeepSpeed: "Type fp16 is not supported on your device" on most of them.',
            "Set bf16: true, or bf16: false for fp32.",
        )


def _schedule(config: dict, source: str, settings: Settings) -> Iterator[Finding]:
    scheduler = config.get("scheduler", {})
    parameters = scheduler.get("params", {})
    steps = settings.max_steps
    if scheduler.get("type") in LOG_WARMUP and "warmup_type" not in parameters:
        yield Finding(
            "ZR216",
            f"{scheduler['type']} in {source} warms up along a logarithm",
            "That is DeepSpeed's default (runtime/lr_schedules.py, WARMUP_LOG_RATE): half the steps of the warm-up "
            "bring more than half the learning rate. The recipe's lr_scheduler_type would warm up linearly.",
            'Write "warmup_type": "linear", or "log" if it is meant.',
            level="warning",
        )
    for key in ("total_num_steps", "warmup_num_steps"):
        written = parameters.get(key, "auto")
        if written == "auto" or steps <= 0 or (key == "warmup_num_steps" and written < steps):
            continue
        if written != steps:
            yield Finding(
                "ZR217",
                f"{source} has scheduler.params.{key} {written}, the run has {steps} steps",
                "The schedule would never end its warm-up, or end at another step than the run.",
                f'Write "{key}": "auto", or remove the scheduler block: the recipe\'s lr_scheduler_type then counts.',
            )


def _without_effect(config: dict, source: str) -> Iterator[Finding]:
    if "activation_checkpointing" in config:
        yield Finding(
            "ZR218",
            f"the activation_checkpointing block of {source} does nothing here",
            "Only models that call deepspeed.checkpointing read it; those of transformers do not.",
            "Remove it, and set activation_checkpointing: true in the recipe.",
            level="warning",
        )
    if "thread_count" in config.get("aio", {}):
        yield Finding(
            "ZR219",
            f"aio.thread_count in {source} does nothing",
            "DeepSpeed 0.19.8 reads intra_op_parallelism (runtime/swap_tensor/aio_config.py).",
            'Write "intra_op_parallelism" instead.',
            level="warning",
        )
    unknown = sorted(set(config) - _known_to_deepspeed())
    if unknown:
        yield Finding(
            "ZR220",
            f"unknown top-level keys in {source}: {', '.join(unknown)}",
            "DeepSpeed ignores them silently.",
            "Check their spelling, or remove them.",
            level="warning",
        )


def _known_to_deepspeed() -> set[str]:
    from deepspeed.runtime import constants

    return BLOCKS | {value for value in vars(constants).values() if isinstance(value, str)}
