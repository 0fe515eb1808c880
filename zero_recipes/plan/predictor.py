"""Which prediction is asked: the engine's simulation, or the textbook formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_recipes.plan import formulas
from zero_recipes.plan.advice import Predict
from zero_recipes.plan.job import Job, Prediction


def of(quick: bool = False) -> Predict:
    """The simulation; the formulas where they are asked for, or where libraries are newer than the simulation."""
    from zero_recipes.plan import simulation

    unknown = simulation.unknown_versions()
    if not (quick or unknown):
        return simulation.predict

    def predict(job: Job) -> Prediction:
        prediction = formulas.predict(job)
        said = [] if quick else [f"By formulas: the simulation does not know {', '.join(unknown)}."]
        return prediction | {"notes": [*said, *prediction["notes"]]}

    return predict


def prepare(jobs: Sequence[Job], done: Callable[[Job], None]) -> None:
    """Simulate these jobs side by side, so that `of()` finds their answers; `done` is told of each. Raises Refusal."""
    from zero_recipes.plan import simulation

    if not simulation.unknown_versions():
        simulation.predict_all(jobs, done)
