"""Under FSDP2 in bf16 TRL's loss is rounded to three digits: 6.813 where it is 6.797.

accelerate's mixed precision also casts what the model returns, and TRL computes the loss inside. `fsdp_config` takes no
other policy.

Library: accelerate 1.15, utils/dataclasses.py (`FullyShardedDataParallelPlugin.set_mixed_precision`); transformers
    5.23, training_args.py (`fsdp_plugin_args`).
Upstream: none found.
Here: accelerate is given a policy that leaves the output as it is.

See it: one CPU

    import torch
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
"""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def apply(training_args) -> None:
    """Give FSDP2 a policy for 16 bits that leaves the loss in fp32, before there is a trainer."""
    if training_args.bf16 or training_args.fp16:
        dtype = torch.bfloat16 if training_args.bf16 else torch.float16
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        training_args.fsdp_plugin_args["mixed_precision_policy"] = policy
