"""What a GPU holds beside the tensors that a plan counts: overheads.yaml, one set of numbers for every prediction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from zero_recipes.metrics.prediction import ReservedRange

FILE = Path(__file__).with_name("overheads.yaml")


@dataclass(frozen=True)
class Overheads:
    """Bytes of a CUDA context and of a NCCL communicator, and the factor on the allocator's segments.

    `measured`: whether a GPU showed what every run has; one GPU alone cannot show a communicator.
    """

    context: float
    communicator: float
    fragmentation: float
    measured: bool

    def beside_segments(self, world_size: int) -> int:
        """Bytes of one GPU that the caching allocator does not know of."""
        return int(self.context + (self.communicator if world_size > 1 else 0))

    def reserved_range(self, segments: int, world_size: int) -> ReservedRange:
        """What a process takes of its GPU whose allocator holds `segments` bytes at its peak."""
        beside = self.beside_segments(world_size)
        return ReservedRange(low=segments + beside, high=int(segments * self.fragmentation) + beside)


@cache
def overheads() -> Overheads:
    entries = yaml.safe_load(FILE.read_text())
    measured = entries["context"]["measured"] and entries["fragmentation"]["measured"]
    return Overheads(**{name: entry["value"] for name, entry in entries.items()}, measured=measured)
