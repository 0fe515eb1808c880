"""Predictions that are kept: the same job with the same versions is not asked about twice, by later programs either."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from zero_recipes import machine
from zero_recipes.plan.advice import Predict
from zero_recipes.plan.job import Job, Prediction


def kept(predict: Predict, folder: Path | None = None) -> Predict:
    """`predict` that looks into `folder` first (unset: beside the hub's cache) and leaves its answers there."""
    folder = _default() if folder is None else folder
    versions = machine.versions() | {"predict": predict.__module__, "zero_recipes/plan": _own_code()}

    def ask(job: Job) -> Prediction:
        path = folder / f"{job.key(versions)}.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            prediction = predict(job)
        _write(path, json.dumps(prediction))
        return prediction

    return ask


def _default() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "zero-recipes" / "plans"


def _own_code() -> str:
    """A hash of this folder: other code, other answers."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    """Whole or not at all; a full or read-only disk costs the next program its time, and no run its training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        return
