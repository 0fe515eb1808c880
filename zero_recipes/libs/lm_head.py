"""Which positions TRL's LM head scores."""

from __future__ import annotations

from zero_recipes.libs.parts_of_trl import LM_HEAD


def score_supervised_positions_only(wanted: bool) -> None:
    """Have CPUs leave prompts and padding out of the LM head, or (`wanted` false) score every position, as TRL does.

    TRL 1.16, trainer/utils.py `add_fused_lm_head` leaves them out where Triton runs (GPUs) and scores all positions
    elsewhere: Neuron would compile anew for every number of them. CPUs compile nothing, yet pay for each position
    twice, in forward and again in backward, which computes the logits anew. For the whole process; called again, the
    last call counts. Raises Refusal where TRL has another LM head.
    """
    from trl.trainer import utils

    unpatched = getattr(utils._use_triton, "unpatched", utils._use_triton)
    if not wanted:
        utils._use_triton = unpatched
        return
    LM_HEAD.require()

    def _use_triton(device):
        return device.type == "cpu" or unpatched(device)

    _use_triton.unpatched = unpatched
    utils._use_triton = _use_triton
