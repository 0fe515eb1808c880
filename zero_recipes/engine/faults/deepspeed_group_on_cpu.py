"""On CPUs under torchrun or `deepspeed`, zero.Init sees a world of one and every process keeps the whole model.

TrainingArguments starts no DeepSpeed group with `use_cpu`, and drops `ddp_timeout`. What is built before the engine is
not partitioned; gloo then waits for torch's default of 30 minutes.

Library: transformers 5.23, training_args.py (`_setup_devices`, branch `use_cpu`).
Upstream: none found.
Here: the group is started before TrainingArguments exist.

See it: one CPU

    import torch
    from transformers import TrainingArguments

    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    TrainingArguments("/tmp/out", use_cpu=True, deepspeed=config).device
    from deepspeed import comm

    assert not comm.is_initialized()
"""

from datetime import timedelta


def start_deepspeed_group(backend: str, timeout: timedelta) -> None:
    """Start DeepSpeed's communication on torch's default group, with the run's timeout."""
    import deepspeed

    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
