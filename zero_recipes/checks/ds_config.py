"""Checks of a DeepSpeed configuration against the run: what contradicts it, and what does nothing under the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_recipes.refusal import Finding

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# blocks that DeepSpeed 0.19.8 names outside runtime/constants.py
BLOCKS = {
    *("zero_optimization", "aio", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("elasticity", "autotuning", "compression_training", "data_efficiency", "curriculum_learning", "nebula"),
    *("hybrid_engine", "compile", "tensor_parallel", "pipeline", "expert_parallel", "torch_autocast", "checkpoint"),
    *("weight_quantization", "monitor_config", "activation_checkpointing", "bf16", "fp16", "zenflow"),
}


def ds_config_findings(
    config: dict[str, Any], source: str, values: dict[str, Any], world_size: int, device: str
) -> list[Finding]:
    """All findings about one DeepSpeed configuration. `values`: the recipe's keys in force."""
    return [
        *_batches(config, source, values, world_size),
        *_precision(config, source, values, device),
        *_schedule(config, source, values),
        *_without_effect(config, source),
    ]


def _batches(config: dict, source: str, values: dict, world_size: int) -> Iterator[Finding]:
    micro, accumulation = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    wanted = dict(zip(BATCH_KEYS, (micro * accumulation * world_size, micro, accumulation), strict=True))
    for key in BATCH_KEYS:
        written = config.get(key, "auto")
        if written not in ("auto", wanted[key]):
            yield Finding(
                f"{source} sets {key} to {written}, the run has {wanted[key]}",
                f"{micro} per device x {accumulation} accumulations x {world_size} processes; transformers "
                "(integrations/deepspeed.py `trainer_config_finalize`) stops on the difference.",
                f'Write "{key}": "auto", and the batch in the recipe.',
            )
        elif written != "auto" and config.get("zero_optimization", {}).get("stage") == 3 and values["use_cpu"]:
            yield Finding(
                f"{source} sets {key} by hand under ZeRO stage 3 on a CPU",
                'DeepSpeed 0.19.8 checks it against a world of one there ("8 != 4 * 1 * 1"), even where it is right.',
                f'Write "{key}": "auto".',
            )


def _precision(config: dict, source: str, values: dict, device: str) -> Iterator[Finding]:
    bf16 = values["bf16"] is not False and not values["fp16"]  # TRL's default is bf16
    for block, asked in (("fp16", bool(values["fp16"])), ("bf16", bf16)):
        enabled = config.get(block, {}).get("enabled", False if block == "fp16" else "auto")
        if enabled == "auto" or enabled == asked:
            continue
        yield Finding(
            f"{source} has {block} {'on' if enabled else 'off'}, the recipe has it {'on' if asked else 'off'}",
            "transformers stops on the difference, after the model has been loaded.",
            f'Write "{block}": {{"enabled": "auto"}}; the recipe\'s bf16 and fp16 decide (TRL\'s default is bf16).',
        )
    if values["fp16"] and device == "cpu":
        yield Finding(
            "fp16 on a CPU",
            'DeepSpeed: "Type fp16 is not supported on your device" on most of them.',
            "Set bf16: true, or bf16: false for fp32.",
        )


def _schedule(config: dict, source: str, values: dict) -> Iterator[Finding]:
    parameters = config.get("scheduler", {}).get("params", {})
    steps = values["max_steps"]
    for key in ("total_num_steps", "warmup_num_steps"):
        written = parameters.get(key, "auto")
        if written == "auto" or steps <= 0 or (key == "warmup_num_steps" and written < steps):
            continue
        if written != steps:
            yield Finding(
                f"{source} has scheduler.params.{key} {written}, the run has {steps} steps",
                "The schedule would never end its warm-up, or end at another place than the run.",
                f'Write "{key}": "auto", or remove the scheduler block: the recipe\'s lr_scheduler_type then counts.',
            )


def _without_effect(config: dict, source: str) -> Iterator[Finding]:
    if "activation_checkpointing" in config:
        yield Finding(
            f"the activation_checkpointing block of {source} does nothing here",
            "Only models that call deepspeed.checkpointing read it; those of transformers do not.",
            "Remove it, and set activation_checkpointing: true in the recipe.",
            level="warning",
        )
    if "thread_count" in config.get("aio", {}):
        yield Finding(
            f"aio.thread_count in {source} does nothing",
            "DeepSpeed 0.19.8 reads intra_op_parallelism (runtime/swap_tensor/aio_config.py).",
            'Write "intra_op_parallelism" instead.',
            level="warning",
        )
    unknown = sorted(set(config) - _known_to_deepspeed())
    if unknown:
        yield Finding(
            f"unknown top-level keys in {source}: {', '.join(unknown)}",
            "DeepSpeed ignores them without a word.",
            "Check their spelling, or remove them.",
            level="warning",
        )


def _known_to_deepspeed() -> set[str]:
    from deepspeed.runtime import constants

    return BLOCKS | {value for value in vars(constants).values() if isinstance(value, str)}
