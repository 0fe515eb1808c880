"""Does it fit? A prediction held against the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_recipes.metrics.prediction import Prediction

Word = Literal["fits", "tight", "no"]


@dataclass(frozen=True)
class Verdict:
    """`margin` is what is left of the GPU's memory at the high end of the reserved range, in bytes; below 0 it lacks.

    "fits": the high end fits. "tight": only the low end does. "no": not even that, or the host's memory is too small.
    """

    word: Word
    margin: int
    capacity: int
    host_lacks: int = 0  # bytes of one machine's memory; 0 where it is enough or not known


def judge(prediction: Prediction, capacity: int, host: int | None = None) -> Verdict:
    """`capacity`: bytes of the GPU's memory; `host`: of the memory of each machine, None where it is not known."""
    reserved = prediction["reserved_bytes"]
    word = "fits" if reserved["high"] <= capacity else "tight" if reserved["low"] <= capacity else "no"
    lacks = 0 if host is None else max(0, max(prediction["host_bytes"].values()) - host)
    return Verdict("no" if lacks else word, capacity - reserved["high"], capacity, lacks)
