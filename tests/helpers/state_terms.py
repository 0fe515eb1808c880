"""What DeepSpeed 0.19.8 really allocates for model states with Adam: the paper's terms and each deviation, in bytes.

The expectation that the engine's bytes are compared with. Line numbers are those of deepspeed/runtime/. "Groups" are
the optimizer's parameter groups (the Trainer makes two: with weight decay and without), each a list of tensor sizes in
elements, in the order of the model. zero_recipes/engine/deepspeed.py reads the engine and knows nothing of these terms.
"""

from collections.abc import Sequence
from math import prod
from operator import mul
from typing import NamedTuple

Groups = Sequence[Sequence[int]]


class Widths(NamedTuple):
    """Bytes of one element."""

    weight: int = 2  # parameters and gradients
    master: int = 4  # master weights and the gradients that the optimizer gets
    state: int = 4  # each of Adam's two

    @property
    def optimizer(self) -> int:
        return self.master + 2 * self.state


PLAIN = Widths()
BF16_STATES = Widths(master=2, state=2)  # bf16_master_weights_and_grads with bf16_optimizer_states
AUTOCAST = Widths(weight=4)  # torch_autocast, and plain fp32: the weights are no masters, stages 1 to 3 keep both
STEP_COUNTER = 4  # bytes: torch's Adam keeps `step` as one fp32 scalar per tensor that it is given
START_ALIGNMENT = 2  # elements; zero/stage_1_and_2.py:441 `nccl_start_alignment_factor`


def model_state_terms(
    groups: Groups, world_size: int, rank: int, stage: int | None, reduce_bucket: int, widths: Widths = PLAIN
) -> dict[str, int]:
    """{"params" | "grads" | "optimizer": bytes}, the largest within one optimizer step without accumulation.

    `stage`: None for DDP; `reduce_bucket`: zero_optimization.reduce_bucket_size, in elements.
    """
    psi, tensors = sum(map(sum, groups)), sum(map(len, groups))
    if stage == 0 and widths == PLAIN:
        # fp16/unfused_optimizer.py: masters per tensor (67-77); step() adds fp32 gradients to the bf16 ones (201-205)
        return {"params": 2 * psi, "grads": (2 + 4) * psi, "optimizer": 12 * psi + STEP_COUNTER * tensors}
    if not stage:
        # DDP under autocast: fp32 weights are their own master (torch, no DeepSpeed, which wraps nothing in fp32 at
        # stage 0: engine.py, _do_optimizer_sanity_check)
        return {"params": 4 * psi, "grads": 4 * psi, "optimizer": 8 * psi + STEP_COUNTER * tensors}
    if stage == 3:
        return _stage_3(groups, world_size, widths)
    return _stages_1_and_2(groups, world_size, rank, stage, reduce_bucket, widths)


def fsdp2_terms(
    shapes: Sequence[Sequence[int]], world_size: int, rank: int, bf16: bool, accumulates: bool
) -> dict[str, int]:
    """FSDP2 (torch.distributed.fsdp.fully_shard), whose fp32 shards are their own master; without DeepSpeed.

    Each tensor is cut by its first dimension (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), the memory of
    parameters and gradients padded to the largest part. accelerate 1.15 keeps trainable parameters in fp32 under bf16
    too (utils/fsdp_utils.py, fsdp2_prepare_model); a gradient is reduced in bf16 and kept in fp32. Between micro steps
    gradients lie there whole, in the dtype in which they are reduced.
    """
    rows, row = [shape[0] for shape in shapes], [prod(shape[1:]) for shape in shapes]
    parts = [-(-count // world_size) for count in rows]
    mine = [max(0, min(part, count - part * rank)) for part, count in zip(parts, rows, strict=True)]
    padded, own = (sum(map(mul, cut, row)) for cut in (parts, mine))
    whole = (2 if bf16 else 4) * sum(map(prod, shapes)) if accumulates else 0
    counters = STEP_COUNTER * len(shapes)
    return {"params": 4 * padded, "grads": max(4 * padded, whole), "optimizer": 8 * own + counters}


def _stages_1_and_2(
    groups: Groups, world_size: int, rank: int, stage: int, reduce_bucket: int, widths: Widths
) -> dict[str, int]:
    """zero/stage_1_and_2.py: flat groups (505), masters per partition (560), gradient buffer (2187-2194), a copy of
    one group at a time for its master in step() (3118, 3126); the buffer is freed with the last group. One process has
    no buffer (contiguous_gradients false, config/ds_config.py): each group's gradients go with their copy."""
    padded = [-(-sum(group) // (align := START_ALIGNMENT * world_size)) * align for group in groups]
    mine, others = [], []
    for group, size in zip(groups, padded, strict=True):
        inside, outside = _touching(group, size // world_size, rank)
        mine += inside
        others += outside
    partition = widths.weight * sum(mine)  # parameters that its edges cut are kept whole
    # zeros fill the last rank's other groups (2782)
    tail = sum(size - sum(group) for group, size in zip(groups[1:], padded[1:], strict=True))
    step = partition + widths.master * padded[0] // world_size + widths.weight * tail * (rank == world_size - 1)
    backward = 0
    if world_size == 1:
        step = widths.master * padded[0] + widths.weight * sum(padded[1:])
        backward = partition
    elif stage == 1:  # stage 2 frees gradients of other ranks once they are reduced (2252-2261)
        large = [size for size in others if size > reduce_bucket]  # kept until backward ends
        embedding = groups[0][0]  # the model's first tensor: its gradient comes last and is not reduced yet
        in_flight = embedding if embedding > reduce_bucket and padded[0] // world_size * rank < embedding else 0
        backward = partition + widths.weight * (sum(large) + in_flight)
    return {
        "params": widths.weight * sum(padded),
        "grads": max(step, backward),
        "optimizer": widths.optimizer * sum(padded) // world_size + STEP_COUNTER * len(groups),
    }


def _stage_3(groups: Groups, world_size: int, widths: Widths) -> dict[str, int]:
    """zero/partition_parameters.py pads each tensor to N partitions; zero/stage3.py: one gradient buffer (791), a
    copy of one sub-group at a time for its master in step() (2686-2693). Exact while a parameter group fits into one
    sub-group. Masters of the weights' own dtype would be the weights themselves (1162), but for a comparison of
    torch.device with a name, which is never true."""
    partitions = [sum(-(-size // world_size) for size in group) for group in groups]
    held = sum(partitions)
    return {
        "params": widths.weight * held,
        "grads": widths.weight * held + widths.master * max(partitions),
        "optimizer": widths.optimizer * held + STEP_COUNTER * len(groups),
    }


def _touching(group: Sequence[int], partition: int, rank: int) -> tuple[list[int], list[int]]:
    """(tensors that have elements in this rank's partition, the others): zero/stage_1_and_2.py `get_partition_info`."""
    start, end, at = partition * rank, partition * (rank + 1), 0
    inside, outside = [], []
    for size in group:
        (inside if at < end and at + size > start else outside).append(size)
        at += size
    return inside, outside
