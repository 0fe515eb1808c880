"""`safe_set_full_fp32_param` at stage 3 raises a size mismatch where the processes do not divide a parameter's size.

The last process's part is padded. DeepSpeed narrows the whole value to a whole part there, past its end.

Library: DeepSpeed 0.19.8, runtime/zero/stage3.py (`set_full_hp_param`), by utils/tensor_fragment.py.
Upstream: none found.
Here: DeepSpeed's call for a part is given a part that is padded.

See it: two processes on CPUs

    import deepspeed, torch

    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    model = torch.nn.Linear(3, 1, bias=False)
    adam = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    failed = False
    try:
        deepspeed.utils.safe_set_full_fp32_param(model.weight, torch.ones(1, 3))
    except (RuntimeError, IndexError) as error:
        failed = True
        print(error)
    assert failed == (torch.distributed.get_rank() == 1)
"""

import torch


def set_own_part(p: torch.nn.Parameter, mine: torch.Tensor, state: str | None) -> None:
    """Copy this rank's elements of a whole master or moment into place. For parameters of stage 3.

    `mine`: flat, without padding. `state`: "exp_avg" or "exp_avg_sq"; None: the master.
    """
    from deepspeed import utils

    part = torch.zeros(p.ds_tensor.numel(), dtype=mine.dtype)
    part[: mine.numel()] = mine
    utils.safe_set_local_optimizer_state(p, part, state)
