"""Which collectives go on while the GPU computes, and behind how much of the computation, by what the libraries do.

DeepSpeed 0.19.8:
- stage 0: runtime/engine.py `allreduce_gradients` reduces after the last backward; nothing overlaps.
- stages 1 and 2: with `overlap_comm` a hook reduces each full bucket on a stream of its own while backward goes on
  (zero/stage_1_and_2.py `process_gradients`, `average_tensor`); stage 1 in the last micro step only, stage 2 in each.
  Without it the reduction stands in backward's own stream, or after it. The all-gather of the updated weights comes
  after the optimizer's step (`step`, `all_gather_dp_groups`), where there is nothing to hide behind.
- stage 3: with `overlap_comm` (its default) weights are gathered ahead on a stream of their own in forward and backward
  (zero/partitioned_param_coordinator.py `fetch_sub_module`) where `stage3_prefetch_bucket_size` is not 0, and gradients
  reduced on another (zero/stage3.py `reduce_and_partition_stream`).
torch 2.13: DDP reduces each bucket during backward, under accumulation in the last micro step only (accelerate's
`no_sync`); FSDP2 gathers the next layer while one is at work, and reduces like DDP.
Not counted: the launches of many small collectives, and the hooks in Python that start them; stage 3 has most of both.
"""

from __future__ import annotations

from zero_recipes.plan.job import Job


def window(job: Job) -> float:
    """Share of a step's computation that collectives may go on behind.

    Stage 3 and FSDP2: all of it; gathers of forward and of backward with the reduction are as 1 to 2, and so are the
    two computations. Others reduce behind backward alone.
    """
    if job.zero_stage == 3 or job.is_fsdp:
        return 1
    backward = 3 / 4 if job.recomputes else 2 / 3  # of forward, backward and recomputation
    return backward / (1 if job.zero_stage == 2 else job.settings.gradient_accumulation_steps)


def overlaps(job: Job, collective: str) -> bool:
    """Whether `collective` ("all_reduce", "all_gather"...) goes on beside the computation."""
    if job.ds_config is None:
        return True
    zero, gathers = job.zero.zero, collective.startswith("all_gather")
    if job.zero_stage == 3:
        ahead = zero.get("stage3_prefetch_bucket_size") != 0
        return zero.get("overlap_comm", True) is not False and (ahead or not gathers)
    return job.zero_stage in (1, 2) and bool(zero.get("overlap_comm")) and not gathers
