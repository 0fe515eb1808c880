"""Predictions of jobs: by the engine's simulation where it can do the job, else by the textbook formulas."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from zero_recipes.core import environment
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.job import Job
from zero_recipes.plan.simulator import parent as simulation
from zero_recipes.plan.simulator.time_limit import TimeLimit

Predict = Callable[[Job], Prediction]
BY_FORMULAS = " is by formulas: "  # in a note; a reason follows


class Predictor:
    """Predicts each job once. What was simulated is kept on disk, for later programs with the same versions and code.

    `quick`: by formulas alone. `folder`: of the kept predictions; unset, it is beside the hub's cache. `limit`: of
    the simulations; with one a job is predicted by formulas, with the reason, where it is over or a simulation fails.
    """

    def __init__(self, quick: bool = False, folder: Path | None = None, limit: TimeLimit | None = None):
        self.quick, self.folder, self.limit = quick, folder, limit
        self._unknown = [] if quick else simulation.unknown_versions()
        self._versions = environment.versions() | {"zero_recipes/plan": _own_code()}
        self._known: dict[str, Prediction] = {}

    def __call__(self, job: Job) -> Prediction:
        """Raises Refusal where the job can neither be simulated nor predicted by formulas."""
        key = job.key(self._versions)
        if key not in self._known:
            reason = None if self.quick else self._not_simulated(job)
            if not self.quick and reason is None:
                reason = self._simulate(job)
            if self.quick or reason:
                self._known[key] = _by_formulas(job, reason)
        return self._known[key]

    def _simulate(self, job: Job) -> str | None:
        """None where the job was simulated, else why not. Without a time limit raises Refusal instead."""
        try:
            self.prepare([job])
            return None
        except Refusal as refusal:
            if self.limit is None:
                raise
            if self.limit.over:
                return f"simulations were given {self.limit.seconds:.0f} s"
            return f"{refusal.what}: {refusal.why.splitlines()[-1]}"

    def prepare(self, jobs: Sequence[Job], done: Callable[[Job], None] = lambda job: None) -> None:
        """Simulate these jobs side by side, apart from those that cannot be; `done` is told of each.

        Raises Refusal where a simulation fails.
        """
        wanted = {job.key(self._versions): job for job in jobs if self._not_simulated(job) is None}
        for key, job in wanted.items():
            kept = self._read(key)
            if kept is not None:
                self._known[key] = kept
                done(job)
        missing = {key: job for key, job in wanted.items() if key not in self._known}
        for key, prediction in zip(missing, simulation.simulate(list(missing.values()), done, self.limit), strict=True):
            self._known[key] = prediction
            self._keep(key, prediction)

    def _not_simulated(self, job: Job) -> str | None:
        """Why this job is not simulated; None where it is."""
        if self._unknown:
            return f"the simulation does not know {', '.join(self._unknown)}"
        return simulation.not_simulated(job)

    def _read(self, key: str) -> Prediction | None:
        try:
            return Prediction.model_validate_json(self._path(key).read_bytes())
        except (OSError, ValidationError):
            return None  # not there, or not whole

    def _keep(self, key: str, prediction: Prediction) -> None:
        """Whole or not at all; a full or read-only disk costs the next program its time, and no run its training."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
                file.write(prediction.model_dump_json())
            os.replace(file.name, path)
        except OSError:
            return

    def _path(self, key: str) -> Path:
        if self.folder is not None:
            return self.folder / f"{key}.json"
        from huggingface_hub import constants

        return Path(constants.HF_HOME, "zero-recipes", "plans", f"{key}.json")


def _by_formulas(job: Job, reason: str | None) -> Prediction:
    prediction = predict_by_formulas(job)
    if reason is None:
        return prediction
    return prediction.model_copy(update={"notes": [f"{job.strategy}{BY_FORMULAS}{reason}.", *prediction.notes]})


@functools.cache
def _own_code() -> str:
    """A hash of this folder: other code or other overheads, other answers."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in (*sorted(folder.rglob("*.py")), folder / "overheads.yaml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()
