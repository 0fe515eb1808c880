"""What one rank refuses, all refuse: the others would wait for it in the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from zero_recipes.core.findings import Refusal


def agree(work: Callable[[], Any]) -> list[Any]:
    """What `work` returns on each rank, by rank. Collective; raises the lowest rank's Refusal on all of them."""
    try:
        result, refusal = work(), None
    except Refusal as error:
        result, refusal = None, error
    outcomes = [(result, None if refusal is None else refusal.findings)]
    if distributed.is_initialized():
        outcomes *= distributed.get_world_size()
        distributed.all_gather_object(outcomes, outcomes[0])
    refused = next((findings for _, findings in outcomes if findings is not None), None)
    if refused is not None:
        raise Refusal(refused)
    return [value for value, _ in outcomes]


def gather_rows(own: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors of shape (1, n), as (world size, n), on their device. Collective; torch's own call, since
    accelerate's takes several times as long on the host, which is felt in every step."""
    if not distributed.is_initialized():
        return own
    everyone = own.new_empty(distributed.get_world_size(), own.shape[1])
    distributed.all_gather(list(everyone.split(1)), own)
    return everyone
