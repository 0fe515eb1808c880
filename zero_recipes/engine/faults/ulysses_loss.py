"""With sequence parallelism (`sp_size`) and gradient accumulation, short micro batches weigh as much as long ones.

transformers' loss is the mean over the tokens of each micro batch, not over those of the step. Without sequence
parallelism it counts the step's tokens.

Library: transformers 5.23, integrations/deepspeed.py (`deepspeed_sp_compute_loss`).
Upstream: none found.
Here: the sum of each process's losses is divided by the step's tokens.

See it: any machine

    import inspect

    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    names = inspect.signature(deepspeed_sp_compute_loss).parameters
    assert "num_items_in_batch" not in names  # it cannot know the step's tokens
"""

import torch


def loss_of_a_part(model, inputs: dict[str, torch.Tensor], count: torch.Tensor, processes: int) -> torch.Tensor:
    """Return a process's loss, whose mean over all processes is the mean over all tokens of the step.

    `count`: tokens with loss in the step, of all processes.
    """
    outputs = model(**inputs, labels=inputs["shift_labels"], use_cache=False, fused_lm_head=True)
    return -outputs.log_probs.sum() / count.clamp(min=1) * processes
