"""Predictions that are kept: the same job with the same versions is not asked about twice, by later programs either."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

from zero_recipes.core import environment
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner.advice import Predict
from zero_recipes.planner.job import Job


def kept(predict: Predict, folder: Path | None = None) -> Predict:
    """`predict` that looks into `folder` first (unset: beside the hub's cache) and leaves its answers there."""

    def ask(job: Job) -> Prediction:
        prediction = find(job, folder)
        if prediction is None:
            prediction = predict(job)
            keep(job, prediction, folder)
        return prediction

    return ask


def find(job: Job, folder: Path | None = None) -> Prediction | None:
    """The prediction that is kept for the job; None where there is none that can be read."""
    try:
        return json.loads(_path(job, folder).read_text())
    except (OSError, ValueError):
        return None


def keep(job: Job, prediction: Prediction, folder: Path | None = None) -> None:
    """Whole or not at all; a full or read-only disk costs the next program its time, and no run its training."""
    path = _path(job, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(json.dumps(prediction))
        os.replace(file.name, path)
    except OSError:
        return


def _path(job: Job, folder: Path | None) -> Path:
    return (_default() if folder is None else folder) / f"{job.key(_versions())}.json"


def _default() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "zero-recipes" / "plans"


def _versions() -> dict[str, str]:
    return environment.versions() | {"zero_recipes/planner": _own_code()}


@functools.cache
def _own_code() -> str:
    """A hash of this folder: other code, other answers."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
