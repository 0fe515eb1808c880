"""What other planners answer for a row, in bytes a GPU; None where they have no answer. Nothing is downloaded."""

import functools
import json

import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planners.court import Row
from zero_recipes.core.zero_paper import model_state_bytes
from zero_recipes.tools.plan.job import Job

# hiyouga/LLaMA-Factory README.md@ff6d4d1, "Hardware Requirement", the column for x billion parameters: GB of all GPUs
LLAMA_FACTORY = {"full": 18, "pure": 8, "lora": 2, "qlora": 0.5}


def estimates(row: Row, job: Job, trainable: int) -> dict[str, int | None]:
    parameters, fp32, largest = _sizes(json.dumps(job.config, sort_keys=True))
    method, zero, found = row["method"], job.zero, {}
    # accelerate/commands/estimate.py: "Training using Adam", which knows one GPU and full fine-tuning
    short = job.settings.bf16 or job.settings.dtype == "bfloat16"
    usage = estimate_training_usage(fp32, "bfloat16" if short else "float32")
    found["accelerate estimate-memory"] = max(usage.values()) if method == "full" else None
    # DeepSpeed's take every parameter for a trained one, and know stages 2 and 3 only
    shape = {"num_gpus_per_node": job.ranks_per_node, "num_nodes": max(1, job.world_size // job.ranks_per_node)}
    shape["cpu_offload"] = zero.offload_optimizer is not None or (job.zero_stage == 3 and job.offloads_params)
    states = None
    if job.zero_stage == 2:
        states = estimate_zero2_model_states_mem_needs(parameters, **shape)[1]
    elif job.zero_stage == 3:
        shape["cpu_offload_params"] = job.offloads_params
        states = estimate_zero3_model_states_mem_needs(parameters, largest, **shape)[1]
    found["DeepSpeed's estimators"] = states
    # of all GPUs together, shared out evenly here; "pure": weights in 16 bits without DeepSpeed
    pure = method == "full" and job.ds_config is None and job.settings.dtype == "bfloat16"
    found["LLaMA-Factory's table"] = LLAMA_FACTORY["pure" if pure else method] * parameters / job.world_size
    # arXiv:1910.02054: model states under mixed precision, without activations
    paper = model_state_bytes(parameters, job.world_size, 3 if job.is_fsdp else job.zero_stage or 0, trainable)
    on_host = paper.optimizer + paper.grads if zero.offload_optimizer else 0
    on_host += paper.params if job.offloads_params else 0
    found["ZeRO paper"] = None if job.settings.load_in_4bit else sum(paper) - on_host
    return {name: None if value is None else int(value) for name, value in found.items()}


@functools.cache
def _sizes(config: str) -> tuple[int, int, int]:
    """(parameters, bytes in fp32, parameters of the largest module)."""
    values = json.loads(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).float()
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), calculate_maximum_sizes(model)[0], largest
