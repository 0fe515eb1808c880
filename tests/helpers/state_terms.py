"""What DeepSpeed 0.19.8 really allocates for model states with Adam: the paper's terms and each deviation.

The expectation that the engine's bytes are compared with. Line numbers are those of deepspeed/runtime/. "Groups" are
the optimizer's parameter groups (the Trainer makes two: with weight decay and without), each a list of tensor sizes in
elements, in the order of the model. zero_recipes/libs/deepspeed.py reads the engine and knows nothing of these terms.
"""

from collections.abc import Sequence
from math import prod
from operator import mul
from typing import NamedTuple

Groups = Sequence[Sequence[int]]
Terms = dict[str, dict[str, int]]


class Widths(NamedTuple):
    """Bytes of one element, and what the terms call it."""

    weight: int = 2  # parameters and gradients
    master: int = 4  # master weights and the gradients that the optimizer gets
    state: int = 4  # each of Adam's two

    @property
    def optimizer(self) -> int:
        return self.master + 2 * self.state

    @property
    def named(self) -> tuple[str, str]:
        """(precision of weights and gradients, of the masters)."""
        return NAMES[self.weight], NAMES[self.master]


NAMES = {2: "bf16", 4: "fp32"}
PLAIN = Widths()
BF16_STATES = Widths(master=2, state=2)  # bf16_master_weights_and_grads with bf16_optimizer_states
AUTOCAST = Widths(weight=4)  # torch_autocast, and plain fp32: the weights are no masters, stages 1 to 3 keep both
STEP_COUNTER = 4  # bytes: torch's Adam keeps `step` as one fp32 scalar per tensor that it is given
START_ALIGNMENT = 2  # elements; zero/stage_1_and_2.py:441 `nccl_start_alignment_factor`


def model_state_terms(
    groups: Groups,
    world_size: int,
    rank: int,
    zero_stage: int,
    reduce_bucket: int,
    sub_group: int = 10**9,
    widths: Widths = PLAIN,
) -> Terms:
    """{"params" | "grads" | "optimizer": {term: bytes}}, the largest within one optimizer step without accumulation.

    `reduce_bucket` and `sub_group`: zero_optimization.reduce_bucket_size and sub_group_size, in elements.
    """
    if zero_stage == 0:  # in fp32 DeepSpeed wraps nothing (engine.py, _do_optimizer_sanity_check)
        return _stage_0(groups) if widths == PLAIN else ddp_terms(groups)
    if zero_stage == 3:
        return _stage_3(groups, world_size, sub_group, widths)
    return _stages_1_and_2(groups, world_size, rank, zero_stage, reduce_bucket, widths)


def ddp_terms(groups: Groups) -> Terms:
    """DistributedDataParallel under autocast: fp32 weights and gradients, no separate master (torch, no DeepSpeed)."""
    psi, tensors = sum(map(sum, groups)), sum(map(len, groups))
    return {
        "params": {"fp32 parameters 4Ψ": 4 * psi},
        "grads": {"fp32 gradients 4Ψ": 4 * psi},
        "optimizer": {"Adam 8Ψ": 8 * psi, "step counters": STEP_COUNTER * tensors},
    }


def fsdp2_terms(shapes: Sequence[Sequence[int]], world_size: int, rank: int, bf16: bool, accumulates: bool) -> Terms:
    """FSDP2 (torch.distributed.fsdp.fully_shard), whose fp32 shards are their own master; without DeepSpeed.

    Each tensor is cut by its first dimension (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), the memory of
    parameters and gradients padded to the largest part. accelerate 1.15 keeps trainable parameters in fp32 under bf16
    too (utils/fsdp_utils.py, fsdp2_prepare_model); a gradient is reduced in bf16 and kept in fp32. Between micro steps
    gradients lie there whole, in the dtype in which they are reduced.
    """
    psi, rows, row = sum(map(prod, shapes)), [shape[0] for shape in shapes], [prod(shape[1:]) for shape in shapes]
    parts = [-(-count // world_size) for count in rows]
    mine = [max(0, min(part, count - part * rank)) for part, count in zip(parts, rows, strict=True)]
    padded, own = (sum(map(mul, cut, row)) for cut in (parts, mine))
    share = 4 * psi // world_size
    grads = {"fp32 gradients 4Ψ/N": share, "padding of each tensor": 4 * padded - share}
    whole = (2 if bf16 else 4) * psi
    if accumulates and whole > 4 * padded:
        grads = {"whole gradients between micro steps": whole}
    return {
        "params": {"fp32 parameters 4Ψ/N": share, "padding of each tensor": 4 * padded - share},
        "grads": grads,
        "optimizer": {
            "Adam 8Ψ/N": 2 * share,
            "uneven parts": 8 * own - 2 * share,
            "step counters": STEP_COUNTER * len(shapes),
        },
    }


def _stage_0(groups: Groups) -> Terms:
    """fp16/unfused_optimizer.py: masters per tensor (67-77); step() adds fp32 gradients to the bf16 ones (201-205)."""
    psi, tensors = sum(map(sum, groups)), sum(map(len, groups))
    return {
        "params": {"bf16 parameters 2Ψ": 2 * psi},
        "grads": {"bf16 gradients 2Ψ": 2 * psi, "fp32 copies inside step() 4Ψ": 4 * psi},
        "optimizer": {"fp32 master and Adam 12Ψ": 12 * psi, "step counters": STEP_COUNTER * tensors},
    }


def _stages_1_and_2(
    groups: Groups, world_size: int, rank: int, zero_stage: int, reduce_bucket: int, widths: Widths
) -> Terms:
    """zero/stage_1_and_2.py: flat groups (505), masters per partition (560), gradient buffer (2187-2194), a copy of
    one group at a time for its master in step() (3118, 3126); the buffer is freed with the last group."""
    weight, (low, high) = widths.weight, widths.named
    padded = [_round_up(sum(group), START_ALIGNMENT * world_size) for group in groups]
    psi, padding = sum(map(sum, groups)), sum(padded) - sum(map(sum, groups))
    mine, others = [], []
    for group, size in zip(groups, padded, strict=True):
        inside, outside = _touching(group, size // world_size, rank)
        mine += inside
        others += outside
    partition = {
        f"{low} gradients of the partition {weight}Ψ/N": weight * psi // world_size,
        "parameters cut by its edges, kept whole": weight * sum(mine) - weight * psi // world_size,
    }
    tail = sum(size - sum(group) for group, size in zip(groups[1:], padded[1:], strict=True))
    step = partition | {
        f"{high} copy inside step(), first group": widths.master * padded[0] // world_size,
        "zeros that fill the last rank's other groups (2782)": weight * tail if rank == world_size - 1 else 0,
    }
    large = [size for size in others if size > reduce_bucket]
    embedding = groups[0][0]  # the model's first tensor: its gradient comes last and is not reduced yet
    in_flight = embedding if embedding > reduce_bucket and padded[0] // world_size * rank < embedding else 0
    backward = partition | {
        "others' gradients larger than the reduce bucket, until backward ends": weight * sum(large),
        "the last gradient, not yet reduced": weight * in_flight,
    }
    if zero_stage == 2:  # gradients of other ranks are freed once reduced (2252-2261)
        backward = partition
    return {
        "params": {f"{low} parameters {weight}Ψ": weight * psi, "alignment of the flat groups": weight * padding},
        "grads": max(step, backward, key=lambda terms: sum(terms.values())),
        "optimizer": {
            f"{high} master and Adam {widths.optimizer}Ψ/N": widths.optimizer * psi // world_size,
            "alignment of the flat groups": widths.optimizer * sum(padded) // world_size
            - widths.optimizer * psi // world_size,
            "step counters": STEP_COUNTER * len(groups),
        },
    }


def _stage_3(groups: Groups, world_size: int, sub_group: int, widths: Widths) -> Terms:
    """zero/partition_parameters.py pads each tensor to N partitions; zero/stage3.py: one gradient buffer (791), a
    copy of one sub-group at a time for its master in step() (2686-2693). Exact while a parameter group fits into one
    sub-group. Masters of the weights' own dtype would be the weights themselves (1162), but for a comparison of
    torch.device with a name, which is never true."""
    weight, (low, high) = widths.weight, widths.named
    partitions = [sum(-(-size // world_size) for size in group) for group in groups]
    psi, held = sum(map(sum, groups)), sum(partitions)
    share = {factor: factor * psi // world_size for factor in (weight, widths.optimizer)}
    return {
        "params": {
            f"{low} parameters {weight}Ψ/N": share[weight],
            "padding of each tensor": weight * held - share[weight],
        },
        "grads": {
            f"{low} gradients of the partition {weight}Ψ/N": share[weight],
            "padding of each tensor": weight * held - share[weight],
            f"{high} copy inside step(), largest sub-group": widths.master * min(max(partitions), sub_group),
        },
        "optimizer": {
            f"{high} master and Adam {widths.optimizer}Ψ/N": share[widths.optimizer],
            "padding of each tensor": widths.optimizer * held - share[widths.optimizer],
            "step counters": STEP_COUNTER * len(groups),
        },
    }


def _touching(group: Sequence[int], partition: int, rank: int) -> tuple[list[int], list[int]]:
    """(tensors that have elements in this rank's partition, the others): zero/stage_1_and_2.py `get_partition_info`."""
    start, end, at = partition * rank, partition * (rank + 1), 0
    inside, outside = [], []
    for size in group:
        (inside if at < end and at + size > start else outside).append(size)
        at += size
    return inside, outside


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
