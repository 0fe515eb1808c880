"""What the workers of tests/group.py run. Every case is called on all ranks; arguments and results are JSON."""

from __future__ import annotations

import json

import run_sft
from zero_recipes import model_states
from zero_recipes.metrics import StageMetricsCallback


def train(argv: list[str]) -> dict:
    """One whole run of run_sft.py in this process group; what the engine really was, and metrics.json."""
    run = run_sft.prepare(argv)
    trainer = run_sft.train(run)
    trainer.accelerator.wait_for_everyone()  # rank 0 writes the files
    engine = trainer.model_wrapped
    optimizer = getattr(engine, "optimizer", None)
    return {
        "engine": type(engine).__name__,
        "optimizer": type(optimizer).__name__,
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
        "world_size": trainer.accelerator.num_processes,
        "metrics": json.loads((run.output_dir / "metrics.json").read_text()),
        "groups": parameter_groups(trainer),
    }


def parameter_groups(trainer) -> list[list[int]]:
    """Sizes (elements) of the trainable tensors by the Trainer's optimizer groups: weight decay, then none."""
    names = set(trainer.get_decay_parameter_names(trainer.model))
    groups: tuple[list[int], list[int]] = ([], [])
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            groups[name not in names].append(getattr(p, "ds_numel", p.numel()))
    return list(groups)


def train_with_stowaway(argv: list[str]) -> dict:
    """`train`, with a tensor of 1 MiB hidden in the optimizer's states before the first step."""
    import torch

    original = StageMetricsCallback.on_train_begin

    def hide(self, args, state, control, **kwargs):
        inner = model_states.base_optimizer(self.trainer.optimizer)
        inner.state[torch.nn.Parameter(torch.zeros(1))] = {"hidden": torch.ones(2**18).clone()}
        return original(self, args, state, control, **kwargs)

    StageMetricsCallback.on_train_begin = hide
    try:
        return train(argv)
    finally:
        StageMetricsCallback.on_train_begin = original
