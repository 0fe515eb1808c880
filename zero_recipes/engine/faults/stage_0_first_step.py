"""At stage 0 in bf16 or fp16 the losses differ from those of stages 1 to 3 from the second step on.

DeepSpeed calls `optimizer.step()` with zero gradients when it builds the engine. Adam's counter begins at 1, so the
bias correction of every later step is off, and weight decay has shrunk the fp32 masters once.

Library: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py and fused_optimizer.py (`initialize_optimizer_states`).
Upstream: deepspeedai/DeepSpeed#5104, the same at stages 1 to 3, where it is fixed.
Here: Adam's counters go back to 0, and the masters are copied from the weights, before a fresh run's first step.

See it: one CPU

    import deepspeed, torch

    layer = torch.nn.Linear(3, 3)
    adam = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    _, optimizer, _, _ = deepspeed.initialize(model=layer, optimizer=adam, config=config)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {1.0}, steps  # no step was asked for
    masters = [master for group in optimizer.fp32_groups for master in group]
    assert not torch.equal(masters[0], layer.weight.float())  # decayed
"""

from zero_recipes.engine.deepspeed import set_adam_step


def fresh_adam_at_stage_0(optimizer) -> None:
    """Undo the step that DeepSpeed takes before training. Nothing at other stages.

    Not for a resumed run: its checkpoint overwrote counters and masters.
    """
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        set_adam_step(optimizer, 0)
        optimizer.refresh_fp32_params()
