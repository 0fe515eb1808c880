"""torch's allocators, set before it is imported.

GPU memory: expandable segments grow in place, and less of what is freed stays reserved. With them torch ignores
NCCL_HOOK, which registers memory with NCCL (ProcessGroupNCCL.cpp).

Page-locked host memory: torch 2.13 (ATen/core/CachingHostAllocator.h `allocate`) rounds every pinned allocation up to
a power of two and keeps what is freed: DeepSpeed's offloaded fp32 weights of Pythia-12B on one GPU take 68.7 GB in
place of 47.4. Allocations above `pinned_max_cached_size_mb` are neither rounded nor kept. Its neighbour,
`pinned_max_round_threshold_mb`, alone hands out blocks that are too small (pytorch/pytorch#192722).
"""

import re
from collections.abc import Mapping, MutableMapping
from importlib import metadata

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first of them that is set
EXPANDABLE = "expandable_segments:True"
NCCL_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
PINNED_KEY = "pinned_max_cached_size_mb"
KNOWN_FROM = [2, 13]  # torch 2.11: "Unrecognized key", once CUDA is used
PINNED_LIMIT_MIB = 4  # a batch of a data loader stays below it, what DeepSpeed offloads above


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Set torch's allocators, before it is imported. A user's own values stay."""
    name = _allocator_variable(environment) or ALLOCATOR[0]
    value = environment.get(name, "")
    if environment.keys().isdisjoint({*ALLOCATOR, NCCL_HOOK}):
        value = EXPANDABLE
    release = metadata.version("torch").split(".")[:2]
    if PINNED_KEY not in value and [int(number) for number in release] >= KNOWN_FROM:
        value += "," if value else ""
        value += f"{PINNED_KEY}:{PINNED_LIMIT_MIB}"
    if value:
        environment[name] = value


def allocator_settings(environment: Mapping[str, str]) -> str:
    """Show which variable sets torch's allocators, and to what, as "NAME=VALUE"."""
    name = _allocator_variable(environment)
    return f"{name}={environment[name]}" if name else "torch's defaults"


def _allocator_variable(environment: Mapping[str, str]) -> str | None:
    return next((name for name in ALLOCATOR if environment.get(name)), None)


def pinned_bytes(size: int, environment: Mapping[str, str]) -> int:
    """Count the bytes of host memory that a pinned tensor of `size` bytes takes in this environment."""
    found = re.search(rf"{PINNED_KEY}\s*:\s*(\d+)", allocator_settings(environment))
    limit_mib = int(found[1]) if found else PINNED_LIMIT_MIB
    if size <= 1 or size > limit_mib << 20:
        return size
    return 1 << (size - 1).bit_length()
