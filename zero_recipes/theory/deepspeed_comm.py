"""What DeepSpeed 0.19.8 really sends in one optimizer step, in units of Φ, and the line of source that does it.

The ZeRO paper's volumes stand in zero_paper.py. Line numbers are those of deepspeed/runtime/zero/. Φ is the
bytes of the trainable parameters in the run's precision; an all-reduce counts twice, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping

Terms = dict[str, float]


def volume_terms(zero_stage: int, accumulation: int, multi_rank_buckets: bool = True, kept: bool = True) -> Terms:
    """{what: units of Φ}. `accumulation`: micro steps; `multi_rank_buckets`: zero_optimization's
    use_multi_rank_bucket_allreduce; `kept`: whether stage 3 keeps the parameters gathered from forward to backward, as
    it does from the second step on with models below stage3_max_live_parameters and stage3_max_reuse_distance (1e9
    elements each; partitioned_param_coordinator.py, __params_to_release).
    """
    if zero_stage == 0:
        return {"all-reduce of the gradients": 2.0}
    if zero_stage == 3:
        gathers = "gather of the parameters" if kept else "gathers of the parameters in forward and in backward"
        return {
            f"{gathers} at every micro step": (1.0 if kept else 2.0) * accumulation,
            "reduce-scatter of the gradients at every micro step": 1.0 * accumulation,
        }
    times = accumulation if zero_stage == 2 else 1
    # stage_1_and_2.py, average_tensor: one all-reduce of the bucket for all ranks, or a reduce to each owner
    how, each = ("all-reduce", 2.0) if multi_rank_buckets else ("reduce to the owner", 1.0)
    when = "at every micro step" if zero_stage == 2 else "at the last micro step"
    return {f"{how} of the gradients {when}": each * times, "gather of the parameters": 1.0}


def explained(terms: Mapping[str, float]) -> str:
    """The terms in one line: 2Φ (all-reduce ...) + 1Φ (gather ...)."""
    return " + ".join(f"{units:g}Φ ({what})" for what, units in terms.items())
