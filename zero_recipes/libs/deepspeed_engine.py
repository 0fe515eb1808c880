"""Steps of DeepSpeed's engine and optimizers that have no public name: states of a resharded checkpoint, timers, trace.

Private: of the optimizers of stages 1 to 3 (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py) masters,
groups, `_optimizer_step`, `_lazy_init_hp_params_optimizer_state`, `update_lp_params`,
`_reassign_or_swap_out_partitioned_parameters`, `checkpoint_event_epilogue`, `persistent_parameters`. A resharded
checkpoint goes into a fresh engine by parameter; no public call fills one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_recipes.libs.deepspeed_tensors import base_optimizer


def forget_trace_of_generation(engine) -> None:
    """ZeRO stage 3: drop the order of modules that DeepSpeed has recorded while the model generated.

    Private: the `param_coordinator` of stage 3 and its trace (DeepSpeed 0.19.8,
    runtime/zero/partitioned_param_coordinator.py). It prefetches parameters in the order of the last forward pass.
    Generation passes through the LM head's module, TRL's fused LM head (trl/trainer/utils.py `add_fused_lm_head`)
    gathers the head's weight itself: it finds it in flight and the first training step dies with "Cannot partition a
    param in flight". TRL does the same in models/utils.py `add_hooks`, behind a full gather.
    """
    optimizer = getattr(engine, "optimizer", None)
    if is_stage_3(optimizer):
        coordinator = optimizer.parameter_offload.param_coordinator
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


def is_stage_3(optimizer: Any) -> bool:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)


# states of a resharded checkpoint


def flat_masters(optimizer) -> list[torch.Tensor]:
    """fp32 masters of this rank: of each sub-group at stage 3, of each group at stages 1 and 2."""
    if is_stage_3(optimizer):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def members_of_groups(optimizer) -> list[list[torch.nn.Parameter]]:
    """The parameters of each of `optimizer.param_groups`."""
    if not is_stage_3(optimizer):
        return [list(members) for members in optimizer.bit16_groups]
    groups: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for number, members in enumerate(optimizer.fp16_groups):  # stage 3 cuts groups into sub-groups
        groups[optimizer.sub_group_to_group_id[number]] += members
    return groups


def make_adam_states(optimizer) -> None:
    """Let the optimizer make its own states, whichever Adam it is: one step with zero gradients at a rate of 0.

    They are all overwritten afterwards. DeepSpeed makes none before the first step (zero/stage3.py and
    zero/stage_1_and_2.py, `initialize_optimizer_states`).
    """
    base, stage_3 = base_optimizer(optimizer), is_stage_3(optimizer)
    masters = flat_masters(optimizer)
    rates = [group["lr"] for group in base.param_groups]
    grads = [master.grad for master in masters]  # offloaded ones have a buffer that stays
    for group in base.param_groups:
        group["lr"] = 0.0
    for number, master in enumerate(masters):
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        else:
            master.grad.zero_()
        if stage_3:
            optimizer._optimizer_step(number)
            master.grad = grads[number]
    if not stage_3:
        base.step()
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        optimizer._lazy_init_hp_params_optimizer_state()  # links each parameter to its part of the states
    for group, rate in zip(base.param_groups, rates, strict=True):
        group["lr"] = rate


def refresh_weights(optimizer) -> None:
    """The weights that the forward pass uses, from the fp32 masters: what DeepSpeed does after each step."""
    if not is_stage_3(optimizer):
        optimizer.update_lp_params()
        return
    for number in range(len(flat_masters(optimizer))):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    persistent = optimizer.persistent_parameters
    if persistent:  # small parameters stay gathered: drop the old whole ones, gather the new
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


# constants of utils/timer.py, of the timers that run over all micro steps of one optimizer step: the phase
STEP_TIMERS = {
    "FORWARD_GLOBAL_TIMER": "forward",
    "BACKWARD_GLOBAL_TIMER": "backward",
    "BACKWARD_INNER_GLOBAL_TIMER": "backward_inner",
    "BACKWARD_REDUCE_GLOBAL_TIMER": "backward_reduce",
    "STEP_GLOBAL_TIMER": "optimizer",
}


def read_timers_before_reset(engine, keep: Callable[[dict[str, float]], None]) -> bool:
    """Call `keep` with {phase: seconds} whenever the engine logs its timers; False where wall_clock_breakdown is off.

    Private: `engine.timers` and the names of STEP_TIMERS (DeepSpeed 0.19.8, engine.py and utils/timer.py). Outside of
    `timers.log` they read 0: `step` logs and resets in one.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.utils import timer

    if not isinstance(engine, DeepSpeedEngine) or not engine.wall_clock_breakdown():
        return False
    timers, log = engine.timers, engine.timers.log
    phases = {getattr(timer, name): phase for name, phase in STEP_TIMERS.items()}

    def read_and_log(names, **keywords):
        seconds = {phases[n]: timers(n).elapsed(reset=False) / 1000 for n in names if n in phases}
        if seconds:
            keep(seconds)
        log(names, **keywords)

    timers.log = read_and_log
    return True
