"""Which prediction is asked: the engine's simulation, or the textbook formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_recipes.metrics.prediction import Prediction
from zero_recipes.planner.advice import Predict
from zero_recipes.planner.formulas import family
from zero_recipes.planner.formulas import predict as formulas
from zero_recipes.planner.job import Job


def of(quick: bool = False) -> Predict:
    """The simulation; the formulas where they are asked for, or where it cannot do the job (a note says why)."""
    from zero_recipes.planner.simulator import parent as simulation

    unknown = simulation.unknown_versions()

    def predict(job: Job) -> Prediction:
        why = f"the simulation does not know {', '.join(unknown)}" if unknown else family.not_simulated(job)
        if not (quick or why):
            return simulation.predict(job)
        prediction = formulas.predict(job)
        said = [] if quick else [f"{job.strategy} is by formulas: {why}."]
        return prediction | {"notes": [*said, *prediction["notes"]]}

    return predict


def prepare(jobs: Sequence[Job], done: Callable[[Job], None]) -> None:
    """Simulate these jobs side by side, so that `of()` finds their answers; `done` is told of each. Raises Refusal."""
    from zero_recipes.planner.simulator import parent as simulation

    if not simulation.unknown_versions():
        simulation.predict_all([job for job in jobs if family.not_simulated(job) is None], done)
