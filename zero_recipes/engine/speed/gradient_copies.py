"""A step at stage 3 launches a kernel for each gradient to copy what a reduction comes to into its place.

Library: DeepSpeed 0.19.8, runtime/zero/stage3.py (`partition_grads`).
Upstream: none found.
Here: they are copied, or added, by one call; not into offloaded gradients.
"""

import torch

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let stage 3 put reduced gradients into their places by one call."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    @replaces(Stage3, "partition_grads")
    def partition_grads(partition, self, parameters, parts):
        if self.offload_optimizer:
            return partition(self, parameters, parts)
        wholes = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        buffers = []
        reduced = []
        for parameter, part in zip(parameters, parts, strict=True):
            if not get_accelerator().is_synchronized_device():
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None
            start = parameter.partition_numel() * self._get_param_partition_rank(parameter)
            if start < parameter.ds_numel:  # the rest is padding
                buffers.append(wholes[parameter.ds_id].narrow(0, 0, part.numel()))
                reduced.append(part)
        if buffers:
            put = torch._foreach_add_ if self.micro_step_id else torch._foreach_copy_
            put(buffers, reduced)
        return buffers
