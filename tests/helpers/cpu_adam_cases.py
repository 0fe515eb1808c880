"""Cases of tests/helpers/group.py: DeepSpeedCPUAdam goes on from states of its own."""

import copy

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from zero_recipes.engine.faults.cpu_adam_after_resume import repeat_steps_of_cpu_adam

STEPS = 40
RESUMED_AT = 20


def gone_on(repeats: bool) -> bool:
    """Whether an optimizer that is made anew in the middle comes to the same numbers, to the last bit."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4096))
    gradients = torch.randn(STEPS, 4096)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-2)
    for step in range(STEPS):
        if step == RESUMED_AT:
            other = torch.nn.Parameter(weight.detach().clone())
            resumed = DeepSpeedCPUAdam([other], lr=1e-2)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if repeats:
                repeat_steps_of_cpu_adam(resumed)
        weight.grad = gradients[step]
        optimizer.step()
        if step >= RESUMED_AT:
            other.grad = gradients[step].clone()
            resumed.step()
    return torch.equal(weight, other)
