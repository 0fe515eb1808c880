"""FSDP2 with `use_cpu` shards nothing: every process silently trains the whole model under DistributedDataParallel.

accelerate looks for FSDP only where the type of distribution is on a list without MULTI_CPU.

Library: accelerate 1.15, state.py (`AcceleratorState.__init__`).
Upstream: none found.
Here: a CPU run is given out as MULTI_GPU.

See it: two processes on CPUs

    import os

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_VERSION"] = "2"
    from accelerate import Accelerator

    assert Accelerator(cpu=True).distributed_type == "MULTI_CPU"  # not FSDP
"""


def apply() -> None:
    """Make accelerate shard in a CPU run. Call it once TrainingArguments exist."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
