"""What one rank refuses, all refuse: the others would wait for it in the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from zero_recipes.core.errors import Refusal


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
        raise Refusal.of(refused)
    return [value for value, _ in outcomes]
