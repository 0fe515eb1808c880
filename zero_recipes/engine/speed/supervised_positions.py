"""On CPUs TRL's fused LM head computes the logits of prompts and padding too, forward and backward.

TRL leaves them out only where Triton runs (GPUs): Neuron would compile anew for every number of positions. CPUs compile
nothing, and pay for each position twice, since backward computes the logits anew.

Library: TRL 1.16, trainer/utils.py (`add_fused_lm_head`, `_use_triton`).
Upstream: none found.
Here: CPUs leave them out too.
"""

from zero_recipes.engine.replacing import replaces


def apply(wanted: bool) -> None:
    """Have CPUs leave prompts and padding out of the LM head; `wanted` false: as TRL does. The last call counts."""
    from trl.trainer import utils

    @replaces(utils, "_use_triton")
    def use_triton(runs_on, device):
        return (wanted and device.type == "cpu") or runs_on(device)
