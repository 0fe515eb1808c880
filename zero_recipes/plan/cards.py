"""The GPUs that a plan is held against: their memory, and what others hold of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from zero_recipes.core.hardware import Gpu, gpu_of_device
from zero_recipes.core.process import rank
from zero_recipes.core.units import size
from zero_recipes.plan.overheads import overheads

NAMED = 10**9  # bytes; less may be this process's own: contexts and communicators differ by GPU and driver


@dataclass(frozen=True)
class Card:
    """The GPU of one rank. `total`: bytes; `others`: bytes of it that other processes hold."""

    rank: int
    host: str
    total: int
    others: int

    @property
    def left(self) -> int:
        """Bytes that this rank may take."""
        return self.total - self.others


def card(index: int | None = None) -> Card:
    """This process's GPU as it is now; `index`: another of this machine's."""
    import torch

    free, total = torch.cuda.mem_get_info(index)  # of the device: whoever holds it, this process's context included
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    own = torch.cuda.memory_reserved(index) + overheads().beside_segments(ranks)
    others = max(0, total - free - own)
    return Card(rank(), socket.gethostname(), total, others if others >= NAMED else 0)


def gpu_here() -> Gpu | None:
    """The figures of this process's GPU; None where hardware.yaml does not have it."""
    import torch

    return gpu_of_device(torch.cuda.get_device_name())


def cards_here(processes: int) -> list[Card]:
    """Those that so many processes of one machine take, one each."""
    import torch

    return [card(index) for index in range(min(processes, torch.cuda.device_count()))]


def in_words(chosen: Card, cards: Sequence[Card]) -> str:
    """ "this one has 80.0 GB, 12.0 GB of it held by other processes"; by rank where they differ."""
    alike = len({(card.total, card.others) for card in cards}) == 1
    held = f", {size(chosen.others)} of it held by other processes" if chosen.others else ""
    name = "this one" if alike else f"rank {chosen.rank}'s on {chosen.host}"
    return f"{name} has {size(chosen.total)}{held}"
