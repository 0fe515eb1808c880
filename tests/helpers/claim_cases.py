"""Cases of tests/engine/test_claims.py, for tests/helpers/group.py."""

from __future__ import annotations

import os
from datetime import timedelta

import deepspeed
import torch
from torch import distributed
from torch.distributed import distributed_c10d


def engine_of(stage: int, **zero):
    """A DeepSpeed engine of one linear layer in bf16."""
    model = torch.nn.Linear(64, 64)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": False, **zero},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def bucket_bytes(stage: int, elements: int) -> int:
    """Bytes of the buffer that gradients are collected in, at the end of a backward pass."""
    engine = engine_of(stage, reduce_bucket_size=elements, contiguous_gradients=True)
    optimizer, found = engine.optimizer, []
    reduce = optimizer.reduce_ipg_grads if stage < 3 else None

    def look(*arguments, **keywords):
        found.extend(optimizer.ipg_buckets[torch.bfloat16].buffer)
        return reduce(*arguments, **keywords)

    if stage < 3:  # they are freed when backward ends
        optimizer.reduce_ipg_grads = look
    else:
        found.append(optimizer.ipg_buckets[torch.bfloat16].buffer)
    engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
    return max(buffer.numel() * buffer.element_size() for buffer in found)


def save_alone(folder: str) -> str:
    """What save_checkpoint ends with where rank 0 alone calls it; the other rank waits until it has."""
    engine = engine_of(2)
    store = distributed_c10d._get_default_store()
    if distributed.get_rank() != 0:
        store.wait(["rank 0 has given up"], timedelta(seconds=60))
        return ""
    distributed_c10d._set_pg_timeout(timedelta(seconds=2), distributed.group.WORLD)
    try:
        engine.save_checkpoint(folder)
        ended = "saved"
    except RuntimeError as error:
        ended = str(error)
    store.set("rank 0 has given up", "yes")
    return f"{ended} {sorted(os.listdir(folder)) if os.path.isdir(folder) else []}"
