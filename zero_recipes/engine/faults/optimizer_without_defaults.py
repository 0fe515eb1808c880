"""The schedules `polynomial` and `cosine_with_min_lr` stop under DeepSpeed: no attribute 'defaults'.

transformers reads the learning rate in the optimizer's `defaults`. DeepSpeed's wrappers leave them out.

Library: DeepSpeed 0.19.8, runtime/base_optimizer.py; transformers 5.23, optimization.py.
Upstream: none found.
Here: the wrappers get the `defaults` of torch's optimizer within.

See it: one CPU

    import deepspeed, torch
    from transformers import get_scheduler

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    model = torch.nn.Linear(3, 3)
    adam = torch.optim.AdamW(model.parameters())
    _, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    try:
        get_scheduler("polynomial", optimizer, num_warmup_steps=1, num_training_steps=9)
        raise SystemExit("no fault")
    except AttributeError as error:
        print(error)
"""

from typing import Any

from zero_recipes.engine.deepspeed import base_optimizer


def give_defaults(optimizer: Any) -> None:
    """Give the `defaults` of torch's optimizer to those that DeepSpeed wraps around it."""
    base = base_optimizer(optimizer)
    wrapper = getattr(optimizer, "optimizer", None)  # accelerate's hands on what it wraps
    while wrapper is not None and wrapper is not base:
        if not hasattr(wrapper, "defaults"):
            wrapper.defaults = base.defaults
        wrapper = getattr(wrapper, "optimizer", None)
