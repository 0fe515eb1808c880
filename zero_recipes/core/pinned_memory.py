"""torch's page-locked host memory: how much an allocation really takes, and a limit for it set before torch starts.

torch 2.13 (ATen/core/CachingHostAllocator.h `allocate`) rounds every pinned allocation up to a power of two and keeps
what is freed: DeepSpeed's offloaded fp32 weights of Pythia-12B on one GPU take 68.7 GB in place of 47.4. Allocations
above `pinned_max_cached_size_mb` are neither rounded nor kept. Its neighbour, `pinned_max_round_threshold_mb`, alone
hands out blocks that are too small (pytorch/pytorch#192722) and is never set here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first of them that is set
KEY = "pinned_max_cached_size_mb"
LIMIT_MIB = 4  # a batch of a data loader stays below it, what DeepSpeed offloads above


def limit_rounding(environment: MutableMapping[str, str]) -> None:
    """Have torch, which is not imported yet, round no large pinned allocation; a limit of the user's own stays."""
    if _own_limit(environment) is None:
        name = _in_force(environment)
        environment[name] = ",".join(filter(None, (environment.get(name, ""), f"{KEY}:{LIMIT_MIB}")))


def pinned_bytes(size: int, environment: Mapping[str, str]) -> int:
    """Bytes of host memory that a run under this environment takes for a pinned tensor of `size` bytes."""
    limit = _own_limit(environment)
    if size <= 1 or size > (LIMIT_MIB if limit is None else limit) << 20:
        return size
    return 1 << (size - 1).bit_length()


def _in_force(environment: Mapping[str, str]) -> str:
    return next((name for name in NAMES if environment.get(name)), NAMES[0])


def _own_limit(environment: Mapping[str, str]) -> int | None:
    """MiB that somebody has set."""
    found = re.search(rf"(?:^|,)\s*{KEY}\s*:\s*(\d+)", environment.get(_in_force(environment), ""))
    return int(found[1]) if found else None
