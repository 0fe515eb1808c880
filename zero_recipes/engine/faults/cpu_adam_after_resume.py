"""With an offloaded AdamW a resumed run differs from the uninterrupted one in the last bit of some weights.

DeepSpeed's kernel keeps beta ** step by one multiplication a step, in no state. One that is fresh takes `pow` instead,
which rounds otherwise.

Library: DeepSpeed 0.19.8, csrc/includes/cpu_adam.h (`IncrementStep`), by ops/adam/cpu_adam.py.
Upstream: none found; the same numbers drift between sub-groups: deepspeedai/DeepSpeed#7819.
Here: a fresh optimizer repeats the checkpoint's steps on one number that nobody reads: half a second for 100,000.

See it: one CPU, a C++ compiler

    import copy

    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.randn(4096))
    adam = DeepSpeedCPUAdam([weight], lr=1e-2)
    for step in range(40):
        if step == 20:
            other = torch.nn.Parameter(weight.detach().clone())
            resumed = DeepSpeedCPUAdam([other], lr=1e-2)
            resumed.load_state_dict(copy.deepcopy(adam.state_dict()))
        weight.grad = torch.randn(4096)
        adam.step()
        if step >= 20:
            other.grad = weight.grad.clone()
            resumed.step()
    assert not torch.equal(weight, other)
"""

from typing import Any

import torch

from zero_recipes.engine.deepspeed import base_optimizer


@torch.no_grad()
def repeat_steps_of_cpu_adam(optimizer: Any) -> None:
    """Let a fresh DeepSpeedCPUAdam count the steps of the checkpoint that its states come from. Nothing for others."""
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
