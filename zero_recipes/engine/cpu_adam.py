"""DeepSpeedCPUAdam after a resume: its bias corrections go on to the last bit."""

from typing import Any

import torch

from zero_recipes.engine.deepspeed import base_optimizer


@torch.no_grad()
def repeat_steps_of_cpu_adam(optimizer: Any) -> None:
    """Let a fresh DeepSpeedCPUAdam count the steps of the checkpoint that its states come from.

    Private: `ds_opt_adam.adam_update` (DeepSpeed 0.19.8, ops/adam/cpu_adam.py; csrc/includes/cpu_adam.h,
    `IncrementStep`). The kernel keeps beta ** step by one multiplication a step, in no state. One that is fresh takes
    `pow` instead, which rounds otherwise: a resumed run then differs from the uninterrupted one in the last bit of some
    weights. The steps are repeated here on one number that nobody reads: half a second for 100,000.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    base = base_optimizer(optimizer)
    if not isinstance(base, DeepSpeedCPUAdam):
        return
    steps = [int(state["step"]) for state in base.state.values() if "step" in state]
    group = base.param_groups[0]
    beta1, beta2 = group["betas"]
    weight, gradient, mean, variance = torch.zeros(4, 1).unbind()
    for step in range(1, max(steps, default=0) + 1):
        base.ds_opt_adam.adam_update(
            base.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, True, weight, gradient, mean, variance
        )
