"""What other planners answer for a row, in bytes a GPU; None where they have no answer. Nothing is downloaded."""

import functools
import json
from typing import Any

from zero_recipes.plan.job import Job

NAMES = ("accelerate estimate-memory", "DeepSpeed's estimators", "LLaMA-Factory's table", "ZeRO paper")

# hiyouga/LLaMA-Factory README.md@ff6d4d1, "Hardware Requirement", the column for x billion parameters: GB of all GPUs
LLAMA_FACTORY = {"full": 18, "pure": 8, "lora": 2, "qlora": 0.5}


def estimates(row: dict[str, Any], job: Job, trainable: int) -> dict[str, int | None]:
    model = _sizes(json.dumps(job.config, sort_keys=True))
    found = (_accelerate(row, job, model), _deepspeed(row, job, model), _llama_factory(row, job, model))
    found += (_zero_paper(job, model, trainable),)
    return {name: None if value is None else int(value) for name, value in zip(NAMES, found, strict=True)}


@functools.cache
def _sizes(config: str) -> dict[str, Any]:
    import torch
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).float()
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    total, _ = calculate_maximum_sizes(model)
    return {"parameters": sum(p.numel() for p in model.parameters()), "fp32": total, "largest": max(layers)}


def _accelerate(row: dict[str, Any], job: Job, model: dict[str, Any]) -> float | None:
    """accelerate/commands/estimate.py: "Training using Adam", which knows one GPU and full fine-tuning."""
    from accelerate.commands.estimate import estimate_training_usage

    if row["method"] != "full":
        return None
    short = job.settings.bf16 or job.settings.dtype == "bfloat16"
    usage = estimate_training_usage(model["fp32"], "bfloat16" if short else "float32")
    return max(usage.values())


def _deepspeed(row: dict[str, Any], job: Job, model: dict[str, Any]) -> float | None:
    """Its estimators take every parameter for a trained one, and know stages 2 and 3 only."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    shape = {"num_gpus_per_node": job.ranks_per_node, "num_nodes": max(1, job.world_size // job.ranks_per_node)}
    offload = job.zero.offload_optimizer is not None
    if job.zero_stage == 2:
        return estimate_zero2_model_states_mem_needs(model["parameters"], cpu_offload=offload, **shape)[1]
    if job.zero_stage != 3:
        return None
    offload |= job.offloads_params
    return estimate_zero3_model_states_mem_needs(
        model["parameters"], model["largest"], cpu_offload=offload, cpu_offload_params=job.offloads_params, **shape
    )[1]


def _llama_factory(row: dict[str, Any], job: Job, model: dict[str, Any]) -> float:
    """Of all GPUs together, shared out evenly here. "pure": weights in 16 bits without DeepSpeed."""
    method = row["method"]
    if method == "full" and job.ds_config is None and job.settings.dtype == "bfloat16":
        method = "pure"
    return LLAMA_FACTORY[method] * model["parameters"] / job.world_size


def _zero_paper(job: Job, model: dict[str, Any], trainable: int) -> float | None:
    """arXiv:1910.02054: model states under mixed precision, without activations."""
    from zero_recipes.theory.zero_paper import model_state_bytes

    if job.settings.load_in_4bit:
        return None
    stage = 3 if job.is_fsdp else job.zero_stage or 0
    states = model_state_bytes(model["parameters"], job.world_size, stage, trainable)
    offloaded = states.optimizer + states.grads if job.zero.offload_optimizer else 0
    offloaded += states.params if job.offloads_params else 0
    return sum(states) - offloaded
