"""What the ZeRO paper says each stage costs, as small pure functions.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054: section
3.1 counts the bytes of mixed-precision Adam, 5 the bytes per GPU of the three stages, 7 the communication volume.

Ψ is the number of parameters, N the number of data-parallel ranks, Φ the size of one full set of trainable parameters
(as elements in the paper; as bytes wherever this package multiplies it out). Bytes are floats: Ψ/N need not be whole.
"""

from collections.abc import Container, Mapping
from typing import NamedTuple

# ZeRO++'s strategies by the parts that they have
PLUS_PLUS = {
    "zero3_hpz": {"hpz"},
    "zero3_qwz": {"qwz"},
    "zero3_qgz": {"qgz"},
    "zero3_plus_plus": {"hpz", "qwz", "qgz"},
}


class ModelState(NamedTuple):
    """The bytes that one rank holds of a model's parameters, gradients and optimizer."""

    params: float
    grads: float
    optimizer: float

    @property
    def total(self) -> float:
        """The bytes of all three together."""
        return self.params + self.grads + self.optimizer


MIXED = ModelState(2, 2, 12)  # 16-bit weight and gradient; fp32 master, momentum and variance (section 3.1)
FP32 = ModelState(4, 4, 8)  # the weights are their own master; the paper treats mixed precision only


def model_state_bytes(
    parameters: int, world_size: int, zero_stage: int, trainable: int | None = None, each: ModelState = MIXED
) -> ModelState:
    """Count the bytes per GPU of a model trained with Adam.

    In mixed precision stage 0 takes 16Ψ, 1 4Ψ+12Ψ/N, 2 2Ψ+14Ψ/N, 3 16Ψ/N (sections 5.1 to 5.3).
    `trainable` (default: all): frozen weights own no gradient and no optimizer state; the paper has no such case.
    `each`: bytes of one parameter.
    """
    if trainable is None:
        trainable = parameters
    return ModelState(
        params=each.params * parameters / (world_size if zero_stage >= 3 else 1),
        grads=each.grads * trainable / (world_size if zero_stage >= 2 else 1),
        optimizer=each.optimizer * trainable / (world_size if zero_stage >= 1 else 1),
    )


def communication_units(zero_stage: int) -> int:
    """Count the volume that one rank moves per step in units of Φ: 2, 2, 2, 3 for stages 0 to 3 (section 7).

    An all-reduce is a reduce-scatter plus an all-gather and so counts 2Φ (7.1).
    Stages 1 and 2 replace it by these two halves (7.2.1).
    Stage 3 gathers the parameters once more for the backward pass (7.2.2).
    """
    return 3 if zero_stage == 3 else 2


def plus_plus_units(parts: Container[str]) -> float:
    """Count the volume between nodes per step in units of Φ under ZeRO++: 3 without `parts`, 0.75 with all.

    Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209,
    section 3: qwZ gathers int8 instead of 16 bits (0.5), hpZ keeps the backward gather inside the node (0), and qgZ
    reduces int4 (0.25). The paper adds up all three, and says of qwZ the gather of forward; without hpZ DeepSpeed
    quantises that of backward too (0.5 + 0.5). For one node, all its ranks together.
    """
    forward = 0.5 if "qwz" in parts else 1.0
    backward = 0.0 if "hpz" in parts else forward
    reduction = 0.25 if "qgz" in parts else 1.0
    return forward + backward + reduction


def paper_volume(bytes_by_collective: Mapping[str, int]) -> int:
    """Count the bytes moved in the paper's sense: an all-reduce twice, every other collective once (section 7.1).

    `bytes_by_collective`: of the full unsharded tensors that went through it.
    """
    return sum(2 * size if name.startswith("all_reduce") else size for name, size in bytes_by_collective.items())
