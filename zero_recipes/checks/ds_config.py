"""Checks of a DeepSpeed configuration against the run: what contradicts it, and what does nothing under the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_recipes.checks.ds_parser import REMOVED, fill_auto
from zero_recipes.config.ds_config import DsConfig, parsed_zero
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host
from zero_recipes.core.units import size

# blocks that DeepSpeed 0.19.8 names outside runtime/constants.py
BLOCKS = {
    *("zero_optimization", "aio", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("autotuning", "data_efficiency"),
    *("hybrid_engine", "compile", "tensor_parallel", "pipeline", "expert_parallel", "torch_autocast", "checkpoint"),
    *("weight_quantization", "monitor_config", "activation_checkpointing", "bf16", "fp16", "zenflow"),
}

LOG_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def ds_config_findings(
    config: dict[str, Any], source: str, settings: Settings, world_size: int, device: str
) -> list[Finding]:
    """All findings about one DeepSpeed configuration. `settings`: the recipe's keys in force."""
    return [
        *_unsaved(config, source, settings),
        *_missing(config, source, settings),
        *_mismatches(config, source, settings, world_size),
        *_half_precision(config, source, settings, device),
        *_schedule(config, source, settings),
        *_buckets(config, source, device),
        *_data_routing(config, source),
        *_without_effect(config, source),
    ]


def _unsaved(config: dict, source: str, settings: Settings) -> Iterator[Finding]:
    """A stage 3 that would end without a model."""
    zero = config.get("zero_optimization", {})
    saves = settings.save_model or settings.saves_checkpoints
    if DsConfig(config).stage != 3 or not saves or parsed_zero(zero).gather_16bit_weights_on_model_save:
        return
    if zero.get("stage3_gather_16bit_weights_on_model_save") == "auto":
        yield finding("ZR259", source=source)
        return
    yield finding("ZR206", source=source)


def _missing(config: dict, source: str, settings: Settings) -> Iterator[Finding]:
    """What the run needs and the configuration leaves out: DeepSpeed would stop, or do otherwise in silence.

    A precision's block at stage 3 only: below, accelerate (utils/dataclasses.py, set_mixed_precision) adds it in time.
    """
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    auto = '"auto"'
    needs = {"zero_optimization": ("accelerate stops without it", '{"stage": 2}')}
    if "train_batch_size" not in config:
        needs["train_micro_batch_size_per_gpu"] = ("DeepSpeed stops without it", auto)
    if settings.gradient_accumulation_steps > 1:
        needs["gradient_accumulation_steps"] = ("DeepSpeed would step after every micro batch", auto)
    if settings.max_grad_norm != GRADIENT_CLIPPING_DEFAULT:
        needs["gradient_clipping"] = (
            f"DeepSpeed would clip at {GRADIENT_CLIPPING_DEFAULT}; the recipe's max_grad_norm is "
            f"{settings.max_grad_norm}",
            auto,
        )
    if config.get("zero_optimization", {}).get("stage") == 3 and settings.precision != "fp32":
        needs[settings.precision] = (
            "transformers makes the model of stage 3 by the file as it stands (integrations/deepspeed.py), before "
            f"accelerate adds {settings.precision}: its weights would be others",
            '{"enabled": "auto"}',
        )
    if "stage" not in config.get("zero_optimization", {"stage": 0}):
        needs["zero_optimization.stage"] = ("TRL and accelerate read it by name, and stop", "2")
    for key, (why, written) in needs.items():
        if key not in config:
            yield finding("ZR213", source=source, key=key, why=why, written=written)


def _mismatches(config: dict, source: str, settings: Settings, world_size: int) -> Iterator[Finding]:
    """What transformers itself would stop on (integrations/deepspeed.py), but only once the model is loaded."""
    try:
        mismatches = fill_auto(config, settings, world_size)[0].mismatches
    except Exception:  # values of any form: found by ds_parser.py, with the library's words
        return
    for mismatch in mismatches:
        written, _, wanted = mismatch.removeprefix("- ds ").partition(" vs hf ")
        key = written.partition("=")[0]
        yield finding("ZR214", source=source, written=written, wanted=wanted, key=key)


def _half_precision(config: dict, source: str, settings: Settings, device: str) -> Iterator[Finding]:
    if settings.fp16 and device == "cpu":
        yield finding("ZR215")
    stage_0 = config.get("zero_optimization", {}).get("stage") in (0, None)
    if settings.fp16 and stage_0 and config.get("fp16", {}).get("loss_scale", 0) != 1:
        yield finding("ZR271", source=source)


def _schedule(config: dict, source: str, settings: Settings) -> Iterator[Finding]:
    scheduler = config.get("scheduler", {})
    parameters = scheduler.get("params", {})
    steps = settings.max_steps
    if scheduler.get("type") in LOG_WARMUP and "warmup_type" not in parameters:
        yield finding("ZR216", type=scheduler["type"], source=source)
    for key in ("total_num_steps", "warmup_num_steps"):
        written = parameters.get(key, "auto")
        if written == "auto" or steps <= 0 or (key == "warmup_num_steps" and written < steps):
            continue
        if written != steps:
            yield finding("ZR217", source=source, key=key, written=written, steps=steps)


def _buckets(config: dict, source: str, device: str) -> Iterator[Finding]:
    """On GPUs the plan counts it."""
    elements = config.get("zero_optimization", {}).get("reduce_bucket_size", 0)
    memory, _ = Host().memory()
    if device == "cpu" and isinstance(elements, (int, float)) and 2 * elements > memory:
        yield finding("ZR265", source=source, elements=elements, size=size(2 * elements), size_2=size(memory))
    gathered = config.get("zero_optimization", {}).get("allgather_bucket_size", 0)
    if config.get("zero_optimization", {}).get("stage") in (1, 2) and isinstance(gathered, int) and gathered % 2:
        yield finding("ZR266", source=source, gathered=gathered, gathered_2=gathered + 1)


def _data_routing(config: dict, source: str) -> Iterator[Finding]:
    efficiency = config.get("data_efficiency", {})
    routing = efficiency.get("data_routing", {}) if isinstance(efficiency, dict) else {}
    if isinstance(routing, dict) and efficiency.get("enabled") and routing.get("enabled"):
        yield finding("ZR267", source=source)


def _without_effect(config: dict, source: str) -> Iterator[Finding]:
    if "activation_checkpointing" in config:
        yield finding("ZR218", source=source)
    if "thread_count" in config.get("aio", {}):
        yield finding("ZR219", source=source)
    unknown = sorted(set(config) - _known_to_deepspeed() - set(REMOVED))
    if unknown:
        yield finding("ZR220", source=source, unknown=", ".join(unknown))


def _known_to_deepspeed() -> set[str]:
    from deepspeed.runtime import constants

    return BLOCKS | {value for value in vars(constants).values() if isinstance(value, str)}
