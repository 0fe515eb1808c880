"""A step at stages 1 to 3 launches up to 17 kernels for each gradient to find its norm and what is not finite.

At stages 1 and 2 `check_overflow` takes 13 kernels for each gradient, an all-reduce, and reads the result, though the
norm of the same gradients is infinite or NaN then too, on all ranks, and `step` skips on it. `unscale_and_clip_grads`
reads the norm anew for each group of parameters. At every stage `get_grad_norm_direct` copies each gradient to fp64,
takes its norm by itself, and copies -1.0 from the host.

Library: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
Upstream: none found.
Here: what is not finite is looked for in the norm alone, and the norms of a group are computed by one call. Losses,
    norms and skipped steps are the same. With offloaded gradients nothing changes.
"""

import contextlib
from collections.abc import Sequence
from unittest.mock import patch

import torch

from zero_recipes.engine.replacing import replaces


def apply_to_stages_1_and_2() -> None:
    """Let stages 1 and 2 look for what is not finite in the norm alone, and compute the norms by one call."""
    from deepspeed.runtime.zero import stage_1_and_2

    optimizer = stage_1_and_2.DeepSpeedZeroOptimizer

    def norm_decides(self):
        return self.check_grad_overflow and self.compute_grad_norm and not self.cpu_offload

    @replaces(optimizer, "check_overflow")
    def check_overflow(check, self, partition_gradients=True):
        if not norm_decides(self):
            check(self, partition_gradients)

    @replaces(optimizer, "unscale_and_clip_grads")
    def unscale_and_clip_grads(unscale, self, groups, norm):
        accepted = contextlib.nullcontext()
        if norm_decides(self):
            accepted = patch.object(stage_1_and_2, "is_invalid_grad_norm", lambda norm: False)
        with accepted:
            unscale(self, groups, norm)

    @replaces(optimizer, "get_grad_norm_direct")
    def get_grad_norm_direct(direct, self, gradients, params, norm_type=2):
        own = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
        if not own or norm_type != 2 or self.model_parallel_rank:
            return direct(self, gradients, params, norm_type)
        return norm_of_all_ranks(own, self.dp_process_group, torch.float32)


def apply_to_stage_3() -> None:
    """Let stage 3 compute the norms of a group's gradients by one call. The norm is the same to the last bit."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    @replaces(Optimizer, "get_grad_norm_direct")
    def get_grad_norm_direct(direct, self, gradients, params, norm_type=2):
        group = self._get_param_partition_group(params[0])
        if norm_type != 2 or self.model_parallel_rank or self._autoep_expert_parallel_group(params):
            return direct(self, gradients, params, norm_type)
        return norm_of_all_ranks(gradients, group, torch.float64)


def norm_of_all_ranks(gradients: Sequence[torch.Tensor], group, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of gradients whose parts are on all ranks of `group`: a scalar, -1 where it is not finite.

    Squares are added up in fp64 on each rank, and over the ranks in `dtype`.
    """
    from deepspeed import comm

    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
    total = torch.stack(norms).pow(2).sum().to(dtype)
    comm.all_reduce(total, group=group)
    norm = total.pow(0.5)
    return norm.masked_fill_(~norm.isfinite(), -1.0)
