"""What a GPU holds beside the tensors that a plan counts: overheads.yaml, one set of numbers for every prediction."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from zero_recipes.core.files import write_text
from zero_recipes.metrics.prediction import ReservedRange

FILE = Path(__file__).with_name("overheads.yaml")


class Overhead(BaseModel):
    """One number, whether a GPU showed it, and where it comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: Annotated[float, Field(ge=0)]
    measured: bool
    source: Annotated[str, Field(min_length=1)]


class Factor(Overhead):
    value: Annotated[float, Field(ge=1)]


class Overheads(BaseModel):
    """Bytes of a CUDA context and of a NCCL communicator, and the factor on the allocator's segments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: Overhead
    communicator: Overhead
    fragmentation: Factor

    @property
    def measured(self) -> bool:
        """Whether a GPU showed what every run has: one GPU alone cannot show a communicator."""
        return self.context.measured and self.fragmentation.measured

    def beside_segments(self, world_size: int) -> int:
        """Bytes of one GPU that the caching allocator does not know of."""
        return int(self.context.value + (self.communicator.value if world_size > 1 else 0))

    def reserved_range(self, segments: int, world_size: int) -> ReservedRange:
        """What a process takes of its GPU whose allocator holds `segments` bytes at its peak."""
        beside = self.beside_segments(world_size)
        return ReservedRange(low=segments + beside, high=int(segments * self.fragmentation.value) + beside)


@cache
def overheads() -> Overheads:
    return read_overheads(FILE)


def read_overheads(path: Path) -> Overheads:
    return Overheads.model_validate(yaml.safe_load(path.read_text()))


def write_fitted(fitted: Mapping[str, tuple[float, str]], path: Path = FILE) -> None:
    """Put {name: (value, source)} that a GPU showed into the file; the comment at its head and other entries stay.

    Raises pydantic.ValidationError for what is no overhead; the file is then as it was.
    """
    text = path.read_text()
    entries: dict[str, Any] = yaml.safe_load(text)
    for name, (value, source) in fitted.items():
        entries[name] = {"value": value, "measured": True, "source": source}
    Overheads.model_validate(entries)
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    write_text(path, f"{head}\n{yaml.safe_dump(entries, sort_keys=False, width=118)}")
