"""Does it fit? A prediction held against the memory of a GPU and of its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero_recipes.metrics.prediction import Prediction

FitStatus = Literal["fits", "tight", "no"]


@dataclass(frozen=True)
class Fit:
    """`margin` is what is left of the GPU's memory at the high end of the reserved range, in bytes; below 0 it lacks.

    "fits": the high end fits. "tight": only the low end does. "no": not even that, or the host's memory or NVMe is too
    small.
    """

    status: FitStatus
    margin: int
    capacity: int
    host_lacks: int = 0  # bytes of one machine's memory; 0 where it is enough or not known
    nvme_lacks: int = 0  # bytes of one machine's NVMe, in the same way
    resume_lacks: int = 0  # the same, for going on from a checkpoint; the run itself needs none of it


def fit_of(prediction: Prediction, capacity: int, host: int | None = None, nvme: int | None = None) -> Fit:
    """`capacity`: bytes of the GPU's memory; `host`, `nvme`: of the memory and the NVMe of each machine, None where
    they are not known."""
    reserved, needed = prediction.reserved_bytes, prediction.host_bytes
    status = "fits" if reserved.high <= capacity else "tight" if reserved.low <= capacity else "no"
    lacks = 0 if host is None else max(0, max(needed.load, needed.training) - host)
    resume_lacks = 0 if host is None else max(0, (needed.resume or 0) - host)
    nvme_lacks = 0 if nvme is None else max(0, prediction.nvme_bytes - nvme)
    status = "no" if lacks or nvme_lacks else status
    return Fit(status, capacity - reserved.high, capacity, lacks, nvme_lacks, resume_lacks)
