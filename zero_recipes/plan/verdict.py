"""Does it fit? A prediction held against the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_recipes.plan.job import Prediction

Word = Literal["fits", "tight", "no"]


@dataclass(frozen=True)
class Verdict:
    """`margin` is what is left of the GPU's memory at the high end of the reserved range, in bytes; below 0 it lacks.

    "fits": the high end fits. "tight": only the low end does. "no": not even that.
    """

    word: Word
    margin: int
    capacity: int


def judge(prediction: Prediction, capacity: int) -> Verdict:
    """`capacity`: bytes of the GPU's memory."""
    reserved = prediction["reserved_bytes"]
    word = "fits" if reserved["high"] <= capacity else "tight" if reserved["low"] <= capacity else "no"
    return Verdict(word, capacity - reserved["high"], capacity)
