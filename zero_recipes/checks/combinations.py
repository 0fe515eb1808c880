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
from zero_recipes.core.errors import Finding, Refusal
from zero_recipes.core.process import local_world_size
from zero_recipes.theory.lower_bounds import module_classes, without_memory

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
        yield Finding(
            "ZR128",
            f"lora_target_modules with the single name {only}",
            "TRL 1.16 (trainer/model_config.py, __post_init__) turns a list of one into a string, and PEFT reads a "
            'string as a pattern of the whole path: "No modules were targeted", once the model has been loaded.',
            f'Write lora_target_modules: [".*{only}"].',
        )
    from zero_recipes.data.template import is_template_file

    template = settings.chat_template_path
    if not template or is_template_file(template):
        return
    fix = "Name a .jinja file (no tokens are added), or train without LoRA."
    if zero_stage == 3 and device == "cpu":
        yield Finding(
            "ZR129",
            f"LoRA at ZeRO stage 3 on a CPU with the chat template of another tokenizer ({template})",
            "TRL adds its tokens and trains their rows; PEFT 0.21 (tuners/trainable_tokens/layer.py, "
            "_collect_token_weights) fetches them to a CUDA device.",
            fix,
        )
    if getattr(_model_config(settings), "tie_word_embeddings", False):
        yield Finding(
            "ZR130",
            f"LoRA on tied embeddings with the chat template of another tokenizer ({template})",
            "TRL adds its tokens and trains their rows; PEFT 0.21 wraps the tied LM head (TrainableTokensWrapper) "
            "without a bias, and TRL 1.16 (trainer/utils.py, add_fused_lm_head) needs it in the first step.",
            fix,
        )


def _uneven_ranks(settings: Settings, world_size: int) -> Iterator[Finding]:
    loading = settings.accelerator_config
    if isinstance(loading, str) and loading.lstrip().startswith("{"):  # as the command line gives it
        loading = json.loads(loading)
    if world_size == 1 or not isinstance(loading, dict):
        return
    if loading.get("even_batches") is False and not settings.dataset_streaming:
        yield Finding(
            "ZR134",
            f"accelerator_config.even_batches: false with {world_size} processes",
            "Where rows do not divide, a rank has a batch less (accelerate, data_loader.py, BatchSamplerShard), and "
            "the ranks' collectives no longer match: the run hangs or dies, in training and in evaluation.",
            "Remove it: accelerate then repeats a few rows, and the Trainer drops them from evaluation losses.",
        )


def _weights(settings: Settings, world_size: int) -> Iterator[Finding]:
    if world_size > 1 and not settings.average_tokens_across_devices:
        yield Finding(
            "ZR136",
            f"average_tokens_across_devices: false with {world_size} processes",
            "Each rank then divides by its own tokens (transformers, trainer.py, _get_num_items_in_batch): a token "
            "weighs more where rows are short, and the result depends on how many processes there are.",
            "Remove it: every token of the global batch then weighs the same.",
        )


def _liger(settings: Settings) -> Iterator[Finding]:
    kernels = settings.liger_kernel_config
    if settings.use_liger_kernel and isinstance(kernels, dict) and kernels.get("fused_linear_cross_entropy"):
        yield Finding(
            "ZR190",
            "liger_kernel_config with fused_linear_cross_entropy: true",
            "It reads the LM head's weight outside of its module: under ZeRO stage 3 the weight is a partition there "
            "(linkedin/Liger-Kernel#1048), and TRL 1.16 (trainer/sft_trainer.py) stops on it, the model loaded.",
            "Remove it: TRL computes the loss in chunks by itself, and gathers the weight at stage 3.",
        )


def _launched_alone(strategy, environment: Mapping[str, str]) -> Iterator[Finding]:
    if strategy.world_size > 1:
        return
    by_mpi = any(name.startswith(("OMPI_COMM_WORLD", "PMI_", "MV2_COMM_WORLD")) for name in environment)
    asked_for_more = "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment and "RANK" not in environment
    if asked_for_more and not by_mpi and environment["ACCELERATE_USE_CPU"].lower() != "true":
        yield Finding(
            "ZR340",
            "one process, whatever num_processes says",
            "Under distributed_type NO accelerate starts the script once (accelerate 1.15, commands/launch.py, "
            "simple_launcher).",
            "Write distributed_type: MULTI_GPU for more; for one process num_processes: 1 says what happens.",
            level="warning",
        )
    elif asked_for_more and not by_mpi:
        yield Finding(
            "ZR137",
            "several processes were requested, and accelerate started one",
            "Under distributed_type MULTI_CPU or NO it starts the script once, whatever num_processes says "
            "(accelerate 1.15, commands/launch.py, simple_launcher; utils/launch.py then sets MASTER_ADDR only).",
            "Write distributed_type: MULTI_GPU (it serves CPUs too), as accelerate_configs/ddp.yaml does. For one "
            "process: --num_processes 1, and no MASTER_ADDR in the environment.",
        )
    elif strategy.zero_stage and not (strategy.offload_optimizer or strategy.offload_param):
        yield Finding(
            "ZR138",
            f"ZeRO stage {strategy.zero_stage} with one process",
            "Nothing can be partitioned over one process: every model state stays whole.",
            "Launch with --num_processes 2 or more; for one process leave out DeepSpeed, or offload.",
            level="warning",
        )


def _layer_classes(settings: Settings, strategy, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Classes of the model that an accelerate file names, and which the model does not have."""
    named = (strategy.fsdp_config or {}).get("transformer_layer_cls_to_wrap") or []
    if strategy.is_deepspeed:
        named = environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
    names = [name.strip() for name in named.split(",")] if isinstance(named, str) else list(named)
    model = _model_config(settings) if any(names) else None
    known = module_classes(model, settings.trust_remote_code) if model is not None else None
    missing = [str(name) for name in names if known is not None and name and name not in known]
    if missing:
        yield Finding(
            "ZR341",
            f"the model has no layer of class {', '.join(missing)}",
            "accelerate (utils/dataclasses.py, set_auto_wrap_policy and set_moe_leaf_modules) stops on it once the "
            "model has been loaded.",
            "Name a class of this model, or remove the key: transformers knows the layers of its own models.",
        )


def _trainer_under_deepspeed(settings: Settings, zero_stage: int | None) -> Iterator[Finding]:
    if settings.save_only_model and settings.load_best_model_at_end:
        yield Finding(
            "ZR139",
            "save_only_model with load_best_model_at_end under DeepSpeed",
            "transformers (trainer.py, create_accelerator_and_postprocess) stops on it, after loading the model.",
            "Set save_only_model: false.",
        )
    if settings.auto_find_batch_size and zero_stage == 3:
        yield Finding(
            "ZR140",
            "auto_find_batch_size at ZeRO stage 3",
            "transformers (trainer.py, create_accelerator_and_postprocess) stops on it, after loading the model.",
            "Set per_device_train_batch_size by hand.",
        )


def _experts(settings: Settings, strategy, environment: Mapping[str, str]) -> list[Finding]:
    config = _model_config(settings)
    looked_at = config is not None and is_looked_at(strategy, config)
    model = without_memory(config, settings.trust_remote_code) if looked_at else None
    return expert_findings(settings, strategy, environment, config, model) if looked_at else []


def _model_config(settings: Settings):
    """None where it is not at hand: the run itself refuses that."""
    from zero_recipes.models.load import load_config

    arguments = settings
    try:
        return load_config(arguments, arguments)
    except Refusal:
        return None
