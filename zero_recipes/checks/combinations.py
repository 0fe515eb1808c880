"""Recipes that contradict themselves or their launch: LoRA, packing, uneven ranks, a launch of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from zero_recipes.checks.chat import chat_findings
from zero_recipes.checks.experts import expert_findings, is_looked_at
from zero_recipes.checks.low_precision import low_precision_findings
from zero_recipes.checks.packing import packing_findings
from zero_recipes.checks.quantized import quantized_findings
from zero_recipes.checks.versions import installed_versions
from zero_recipes.checks.zero_options import zero_option_findings
from zero_recipes.checks.zero_unsupported import unsupported_findings
from zero_recipes.config import sequence_parallel
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.core.process import local_world_size
from zero_recipes.model import built_or_none

TOP_LEVEL = {"lm_head", "embed_out"}  # modules whose name is their whole path


def combination_findings(settings: Settings, strategy, device: str, environment: Mapping[str, str]) -> list[Finding]:
    """All findings about keys that do not go together.

    `settings`: the recipe's keys in force; `strategy`: a config.strategy.Strategy; `environment`: the launcher's.
    """
    found = [
        *quantized_findings(settings, strategy),
        *_lora(settings, strategy.zero_stage, device),
        *packing_findings(settings, _model_config(settings), device),
        *_uneven_ranks(settings, strategy.world_size),
        *_weights(settings, strategy.world_size),
        *_liger(settings),
        *_launched_alone(strategy, environment),
        *_layer_classes(settings, strategy, environment),
        *sequence_parallel.sequence_parallel_findings(settings, strategy, device, _model_config(settings)),
        *chat_findings(settings),
    ]
    if strategy.is_deepspeed:
        local = local_world_size(environment, strategy.world_size)
        found += _trainer_under_deepspeed(settings, strategy.zero_stage)
        found += _experts(settings, strategy, environment)
        found += low_precision_findings(strategy.ds_config, settings)
        found += unsupported_findings(strategy.ds_config, device)
        found += zero_option_findings(
            strategy.ds_config, settings, strategy.world_size, local, device, installed_versions()["deepspeed"]
        )
    return found


def _lora(settings: Settings, zero_stage: int | None, device: str) -> Iterator[Finding]:
    if not settings.use_peft:
        return
    modules = settings.lora_target_modules
    only = modules[0] if isinstance(modules, list) and len(modules) == 1 else modules
    if isinstance(only, str) and only.isidentifier() and only not in TOP_LEVEL:
        yield finding("ZR128", only=only)
    from zero_recipes.data.load import is_template_file

    template = settings.chat_template_path
    if not template or is_template_file(template):
        return
    fix = "Name a .jinja file (no tokens are added), or train without LoRA."
    if zero_stage == 3 and device == "cpu":
        yield finding("ZR129", template=template, fix=fix)
    if getattr(_model_config(settings), "tie_word_embeddings", False):
        yield finding("ZR130", template=template, fix=fix)


def _uneven_ranks(settings: Settings, world_size: int) -> Iterator[Finding]:
    loading = settings.accelerator_config
    if isinstance(loading, str) and loading.lstrip().startswith("{"):  # as the command line gives it
        loading = json.loads(loading)
    if world_size == 1 or not isinstance(loading, dict):
        return
    if loading.get("even_batches") is False and not settings.dataset_streaming:
        yield finding("ZR134", world_size=world_size)


def _weights(settings: Settings, world_size: int) -> Iterator[Finding]:
    if world_size > 1 and not settings.average_tokens_across_devices:
        yield finding("ZR136", world_size=world_size)


def _liger(settings: Settings) -> Iterator[Finding]:
    kernels = settings.liger_kernel_config
    if settings.use_liger_kernel and isinstance(kernels, dict) and kernels.get("fused_linear_cross_entropy"):
        yield finding("ZR190")


def _launched_alone(strategy, environment: Mapping[str, str]) -> Iterator[Finding]:
    if strategy.world_size > 1:
        return
    by_mpi = any(name.startswith(("OMPI_COMM_WORLD", "PMI_", "MV2_COMM_WORLD")) for name in environment)
    asked_for_more = "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment and "RANK" not in environment
    if asked_for_more and not by_mpi and environment["ACCELERATE_USE_CPU"].lower() != "true":
        yield finding("ZR340")
    elif asked_for_more and not by_mpi:
        yield finding("ZR137")
    elif strategy.zero_stage and not (strategy.offload_optimizer or strategy.offload_param):
        yield finding("ZR138", zero_stage=strategy.zero_stage)


def _layer_classes(settings: Settings, strategy, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Classes of the model that an accelerate file names, and which the model does not have."""
    named = (strategy.fsdp_config or {}).get("transformer_layer_cls_to_wrap") or []
    if strategy.is_deepspeed:
        named = environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
    names = [name.strip() for name in named.split(",")] if isinstance(named, str) else list(named)
    model = _model_config(settings) if any(names) else None
    built = built_or_none(model, settings.trust_remote_code) if model is not None else None
    known = None if built is None else {type(module).__name__ for module in built.modules()}
    missing = [str(name) for name in names if known is not None and name and name not in known]
    if missing:
        yield finding("ZR341", missing=", ".join(missing))


def _trainer_under_deepspeed(settings: Settings, zero_stage: int | None) -> Iterator[Finding]:
    if settings.save_only_model and settings.load_best_model_at_end:
        yield finding("ZR139")
    if settings.auto_find_batch_size and zero_stage == 3:
        yield finding("ZR140")


def _experts(settings: Settings, strategy, environment: Mapping[str, str]) -> list[Finding]:
    config = _model_config(settings)
    looked_at = config is not None and is_looked_at(strategy, config)
    model = built_or_none(config, settings.trust_remote_code) if looked_at else None
    return expert_findings(settings, strategy, environment, config, model) if looked_at else []


def _model_config(settings: Settings):
    """None where it is not at hand: the run itself refuses that."""
    from zero_recipes.model import load_config

    arguments = settings
    try:
        return load_config(arguments, arguments)
    except Refusal:
        return None
