"""Cases of tests/helpers/group.py: faults of DeepSpeed in engines of a few layers."""

import deepspeed
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
from torch import nn

from tests.helpers.forget import forget_last_run
from zero_recipes.engine.deepspeed import set_state
from zero_recipes.engine.faults import stale_releases
from zero_recipes.engine.speed import module_walks, releases

GATHER = "_PartitionedParameterCoordinator__all_gather_params_"
WIDTH = 512


def stage_3(model: nn.Module, **zero):
    """An engine of DeepSpeed's stage 3 that trains `model` with AdamW."""
    adam = torch.optim.AdamW(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def gathered_after_generation(is_patched: bool) -> list[float]:
    """How often each training step gathers the model, after forward passes without a backward pass."""
    forget_last_run()
    if is_patched:
        stale_releases.apply()
    gather = getattr(Coordinator, GATHER)
    elements: list[int] = []

    def counted(self, parameters, *arguments, **keywords):
        elements[-1] += sum(p.ds_numel for p in parameters if p.ds_status.name == "NOT_AVAILABLE")
        gather(self, parameters, *arguments, **keywords)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    engine = stage_3(model)
    setattr(Coordinator, GATHER, counted)
    try:
        for step in range(-4, 6):
            elements.append(0)
            with torch.set_grad_enabled(step >= 0):
                loss = engine(torch.ones(1, WIDTH)).sum()
            if step >= 0:
                engine.backward(loss)
                engine.step()
    finally:
        setattr(Coordinator, GATHER, gather)
        forget_last_run()
    whole = sum(p.ds_numel for p in model.parameters())
    return [count / whole for count in elements[4:]]


class Shared(nn.Module):
    """Multiplies by one weight twice: in a module within, and then by itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.weight = self.inner.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.inner(rows), self.weight)


def losses_of_shared_weight(is_patched: bool) -> list[float]:
    """Losses at stage 3 of a model whose inner module ends before the outer one needs the same weight."""
    forget_last_run()
    if is_patched:
        releases.apply()
        module_walks.apply()
    torch.manual_seed(0)
    engine = stage_3(nn.Sequential(Shared(), nn.Linear(4, 4)), stage3_param_persistence_threshold=0)
    found = []
    for _ in range(4):
        loss = engine(torch.ones(1, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    forget_last_run()
    return found


def masters_of_uneven_parts() -> list[float]:
    """The fp32 master of five elements on all ranks, set from a whole tensor."""
    model = nn.Linear(5, 1, bias=False)
    stage_3(model)
    set_state(model.weight, "fp32", torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    return deepspeed.utils.safe_get_full_fp32_param(model.weight).flatten().tolist()
