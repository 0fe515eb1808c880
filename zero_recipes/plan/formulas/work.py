"""The work of a step by formulas: what goes through collectives, and the FLOPs of one rank."""

from __future__ import annotations

from zero_recipes.plan.formulas import family
from zero_recipes.plan.formulas.shape import Shape, batch_tokens, computed_width, loaded_width, tokens_of
from zero_recipes.plan.job import Job


def communication_bytes(job: Job, shape: Shape) -> dict[str, int]:
    """Full tensors through each collective in one optimizer step; DeepSpeed's stages 1 and 2 move 3Φ (docs/demo.md).

    Stages 2 and 3 reduce at every micro step (deepspeed/runtime/engine.py), stage 3 gathers for each pass.
    """
    if job.world_size == 1:
        return {}
    width, passes = computed_width(job), job.settings.gradient_accumulation_steps
    gradients, weights = width * shape.trainable, width * shape.parameters
    gathered = {"all_gather": 2 * passes * weights, "reduce_scatter": passes * gradients}
    if job.is_fsdp:
        return gathered | {"reduce_scatter": gradients}
    if job.ds_config is None:
        return {"all_reduce": int(loaded_width(job, shape) * shape.trainable)}
    if job.zero_stage == 0:
        return {"all_reduce": gradients}
    # under torch_autocast linear layers' gradients are reduced in 16 bits; the others, in fp32, are few
    reduced = 2 * shape.trainable if job.zero.autocast else gradients
    if job.zero_stage == 1:
        return {"all_reduce": reduced, "all_gather": gradients}
    if job.zero_stage == 2:
        return {"all_reduce": passes * reduced, "all_gather": gradients}
    return family.compressed(job, gathered)


def flops(job: Job, shape: Shape) -> int:
    """Of one rank and optimizer step: 2 per weight and token forward, 4 backward (2 where weights are frozen), 2 again
    with recomputation; attention 4·s·(heads x width) per layer and token and pass (arXiv:2205.05198, appendix A). Of a
    mixture of experts the weights of those that a token goes to."""
    tokens = batch_tokens(job, shape) * job.settings.gradient_accumulation_steps
    again = 1 if job.recomputes else 0
    frozen = job.settings.use_peft
    products = 2 * (shape.multiplied - shape.idle) * tokens * ((2 if frozen else 3) + again)
    attention = 4 * shape.layers * tokens_of(job, shape) * shape.query_width * tokens * (3 + again)
    return int(products + attention)
