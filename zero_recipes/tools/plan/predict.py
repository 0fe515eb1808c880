"""Predictions of jobs: by the engine's simulation where it can do the job, else by the textbook formulas."""

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
BY_FORMULAS = " uses formulas, because "  # in a note; a reason follows


class Predictor:
    """Predicts each job once, and keeps on disk what was simulated. `quick`: by formulas alone. `seconds`: of
    simulations from now on. Where none can be made, formulas answer and say why."""

    def __init__(self, quick: bool = False, folder: Path | None = None, seconds: float | None = None):
        self.quick, self.seconds = quick, seconds
        self.folder = folder or FOLDER
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self._known: dict[str, Prediction] = {}

    def __call__(self, job: Job) -> Prediction:
        """Raises Refusal where the job can neither be simulated nor predicted by formulas."""
        key = job.key(versions())
        if key not in self._known:
            self.prepare([job])
        return self._known[key]

    def missing(self, jobs: Sequence[Job]) -> dict[str, Job]:
        """Those that must be simulated, by key; the others are predicted. Raises Refusal as above."""
        missing = {}
        for job in jobs:
            key, reason = job.key(versions()), None if self.quick else simulation.not_simulated(job)
            if self.quick or reason:
                self._known[key] = by_formulas(job, reason)
                continue
            try:
                self._known[key] = Prediction.model_validate_json((self.folder / f"{key}.json").read_bytes())
            except (OSError, ValidationError):  # not there, or not whole
                missing[key] = job
        return missing

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Predict these jobs, those that can be simulated side by side. Raises Refusal as above."""
        missing = self.missing(jobs)
        predictions = simulation.simulate(list(missing.values()), self.deadline) if missing else []
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        for (key, job), found in zip(missing.items(), predictions, strict=True):
            if isinstance(found, str):
                reason = f"its simulation failed ({found.splitlines()[-1]})"
                reason = f"the simulations took longer than {self.seconds:.0f} s" if is_late else reason
                self._known[key] = by_formulas(job, reason)
                continue
            self._known[key] = found
            keep(self.folder / f"{key}.json", found.model_dump_json())


def by_formulas(job: Job, reason: str | None) -> Prediction:
    """`reason`: why the engine was not simulated, for a note."""
    prediction = predict_by_formulas(job)
    notes = [f"{job.strategy}{BY_FORMULAS}{reason}."] if reason else []
    return prediction.model_copy(update={"notes": [*notes, *prediction.notes]})


@dataclass(frozen=True)
class Fit:
    """A prediction beside the memory of a GPU and its machine. "fits": the reserved range's high end does; "tight":
    only the low end, for torch frees what it has cached before it fails. `margin`: bytes that the low end leaves; what
    leaves less than `slack` comes last."""

    status: Literal["fits", "tight", "no"]
    margin: int
    slack: int
    capacity: int
    host_lacks: int = 0  # bytes of one machine's memory; 0 where it is enough or not known
    nvme_lacks: int = 0  # bytes of one machine's NVMe, in the same way
    resume_lacks: int = 0  # the same, for going on from a checkpoint; the run itself needs none of it

    @property
    def runs(self) -> bool:
        return self.status != "no"

    @property
    def has_slack(self) -> bool:
        return self.runs and self.margin >= self.slack


def fit_of(prediction: Prediction, capacity: int, host: int | None = None, nvme: int | None = None) -> Fit:
    """`capacity`: bytes of the GPU's memory; `host`, `nvme`: of the memory and the NVMe of each machine, None where
    they are not known."""

    def lacks(needed: int | None, there: int | None) -> int:
        return 0 if there is None else max(0, (needed or 0) - there)

    reserved, needed = prediction.reserved_bytes, prediction.host_bytes
    status = "fits" if reserved.high <= capacity else "tight" if reserved.low <= capacity else "no"
    beside = (lacks(max(needed.load, needed.training), host), lacks(prediction.nvme_bytes, nvme))
    status = "no" if any(beside) else status
    slack = int((overheads().cached[0] - 1) * prediction.allocated_peak_bytes)
    return Fit(status, capacity - reserved.low, slack, capacity, *beside, lacks(needed.resume, host))
