"""After `generate` at stage 3 every training step gathers each parameter twice, whatever stage3_max_reuse_distance is.

DeepSpeed looks ahead in the recorded order of modules for a parameter's next use, and keeps its answers in an
lru_cache. The cache is not cleared when the order is recorded anew. Generation has no backward pass: with its answers
each training step releases parameters in forward and gathers them again for backward. Half as many bytes again are
sent, for the rest of the run.

Library: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`_invalidate_trace`, `__params_to_release`).
Upstream: none found.
Here: the cache is cleared with the order.

See it: one CPU

    import deepspeed, torch
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(2)])
    adam = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    gathered = []
    gather = Coordinator._PartitionedParameterCoordinator__all_gather_params_


    def counted(self, params, *arguments, **keywords):
        gathered[-1] += sum(p.ds_numel for p in params if p.ds_status.name == "NOT_AVAILABLE")
        gather(self, params, *arguments, **keywords)


    Coordinator._PartitionedParameterCoordinator__all_gather_params_ = counted
    for step in range(-4, 6):
        gathered.append(0)
        with torch.set_grad_enabled(step >= 0):
            loss = engine(torch.ones(1, 512)).sum()
        if step >= 0:  # before that it only computes, as generation does
            engine.backward(loss)
            engine.step()
    whole = sum(p.ds_numel for p in model.parameters())
    assert gathered[-1] == 2 * whole, gathered
"""

from collections.abc import Callable
from typing import Any

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let what is released after a module follow from the order of modules in force."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    answers = cache_within(Coordinator._PartitionedParameterCoordinator__params_to_release)

    @replaces(Coordinator, "_invalidate_trace")
    def invalidate_trace(faulty, self):
        faulty(self)
        answers.cache_clear()


def cache_within(function: Callable) -> Any:
    """Return the lru_cache below a function's decorators, whatever names they give to what they wrap.

    DeepSpeed's decorator does not set `__wrapped__`, so inspect.unwrap does not find it. Raises LookupError.
    """
    waiting = [function]
    while waiting:
        inner = waiting.pop()
        if hasattr(inner, "cache_clear"):
            return inner
        for cell in getattr(inner, "__closure__", None) or ():
            waiting.append(cell.cell_contents)
        if hasattr(inner, "__wrapped__"):
            waiting.append(inner.__wrapped__)
    raise LookupError(f"no cache below {function.__qualname__}")
