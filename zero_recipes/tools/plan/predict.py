"""Predictions by the simulated engine where it can do the job, else by formulas."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.cache import FOLDER, keep, versions
from zero_recipes.tools.plan.formulas import overheads, predict_by_formulas
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.simulator import parent as simulation

Predict = Callable[[Job], Prediction]
Progress = Callable[[Job, int], None]  # takes what was simulated, and how many are left
BY_FORMULAS = " uses formulas, because "
SOURCES = {"engine": "the simulated engine", "formulas": "formulas"}


class Predictor:
    """Predicts each job once, and keeps on disk what was simulated."""

    def __init__(self, quick: bool = False, folder: Path | None = None, seconds: float = math.inf):
        """`quick`: by formulas alone. `seconds`: of simulations from now on."""
        self.quick = quick
        self.folder = folder or FOLDER
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self._known: dict[str, Prediction] = {}

    def __call__(self, job: Job) -> Prediction:
        """Raises Refusal for a job that nothing predicts."""
        key = job.key(versions())
        if key not in self._known:
            self.prepare([job])
        return self._known[key]

    def missing(self, jobs: Sequence[Job]) -> dict[str, Job]:
        """Find the jobs that are to be simulated, by key; the others are predicted. Raises Refusal."""
        missing = {}
        for job in jobs:
            key = job.key(versions())
            if key in self._known:
                continue
            reason = None if self.quick else simulation.not_simulated(job) or self._late()
            if self.quick or reason:
                self._known[key] = by_formulas(job, reason)
                continue
            try:
                self._known[key] = Prediction.model_validate_json(self._file(key).read_bytes())
            except (OSError, ValidationError):  # not there, or not whole
                missing[key] = job
        return missing

    def prepare(self, jobs: Sequence[Job], progress: Progress = lambda job, left: None) -> None:
        """Simulate jobs side by side, so that each is predicted at once afterwards. Raises Refusal."""
        missing = self.missing(jobs)
        if not missing:
            return
        left = list(missing)

        def ready(job: Job, prediction: Prediction | str) -> None:
            key = job.key(versions())
            left.remove(key)
            if isinstance(prediction, str):
                failed = f"its simulation failed ({prediction.splitlines()[-1]})"
                self._known[key] = by_formulas(job, self._late() or failed)
            else:
                self._known[key] = prediction
                keep(self._file(key), prediction.model_dump_json())
            progress(job, len(left))

        simulation.simulate(list(missing.values()), self.deadline, ready)

    def _late(self) -> str | None:
        if time.monotonic() >= self.deadline:
            return f"the simulations took longer than {self.seconds:.0f} s"
        return None

    def known(self, job: Job) -> Prediction:
        """Predict a job by what was simulated so far, else by formulas."""
        return self._known.get(job.key(versions())) or by_formulas(job, None)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def by_formulas(job: Job, reason: str | None) -> Prediction:
    """Predict a job by formulas. `reason`: why not by the simulated engine, which a note then says."""
    prediction = predict_by_formulas(job)
    if reason is None:
        return prediction
    note = f"{job.strategy}{BY_FORMULAS}{reason}."
    return prediction.model_copy(update={"notes": [note, *prediction.notes]})


@dataclass(frozen=True)
class Fit:
    """A prediction beside the memory of a GPU and its machine, in bytes."""

    status: Literal["fits", "tight", "no"]  # tight: may run out
    margin: int  # of the GPU, beside what is needed
    capacity: int
    host_lacks: int = 0  # of one machine's memory; 0 where it is enough or not known
    nvme_lacks: int = 0  # of one machine's NVMe
    resume_lacks: int = 0  # of its memory, to read a checkpoint
    host_beyond_usual: int = 0  # of the memory that such a machine usually has, where its own is not known

    @property
    def runs(self) -> bool:
        """Whether the job fits, surely or perhaps."""
        return self.status != "no"

    @property
    def is_sure(self) -> bool:
        """Whether the job fits with room for fragmentation and for the prediction's error."""
        return self.status == "fits"


def fit_of(
    prediction: Prediction,
    capacity: int,
    host: int | None = None,
    nvme: int | None = None,
    usual_host: int | None = None,
) -> Fit:
    """Compare a prediction with a GPU's memory, and a machine's host memory and NVMe, all in bytes.

    `usual_host`: what such a machine usually has. It counts where `host` is not known.
    Without `host` or `nvme` there is no such limit.
    """

    def lacks(needed: int | None, there: int | None) -> int:
        return 0 if there is None else max(0, (needed or 0) - there)

    needed = prediction.reserved_bytes.low
    allocated = prediction.allocated_peak_bytes
    most_allocated = allocated + overheads().unplanned_bytes(prediction.source, allocated, prediction.at_peak)
    on_host = prediction.host_bytes
    host_lacks = lacks(on_host.most, host)
    nvme_lacks = lacks(prediction.nvme_bytes, nvme)
    beyond_usual = lacks(on_host.most, usual_host) if host is None else 0
    status = "tight"
    if host_lacks or nvme_lacks or needed > capacity:
        status = "no"
    elif most_allocated <= overheads().usable_bytes(capacity) and not beyond_usual:
        status = "fits"
    resume_lacks = lacks(on_host.resume, host)
    return Fit(status, capacity - needed, capacity, host_lacks, nvme_lacks, resume_lacks, beyond_usual)
