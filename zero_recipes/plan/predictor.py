"""Which prediction is asked: the engine's simulation, or the textbook formulas."""

from __future__ import annotations

from zero_recipes.plan.advice import Predict
from zero_recipes.plan.cache import kept
from zero_recipes.refusal import Refusal


def for_command(quick: bool) -> Predict:
    """Of `zero-recipes plan`: the simulation, with --quick the formulas. Raises Refusal where there is none."""
    if quick:
        from zero_recipes.plan.formulas import predict

        return predict
    try:
        from zero_recipes.plan.simulation import predict
    except ModuleNotFoundError as error:
        if error.name != "zero_recipes.plan.simulation":
            raise
        raise Refusal(
            "the engine's simulation is not part of this version",
            "There is no zero_recipes/plan/simulation.py.",
            "Add --quick: the textbook formulas, in a second.",
        ) from None
    return kept(predict)


def for_runs() -> Predict:
    """Of a run, before its model is loaded."""
    from zero_recipes.plan.formulas import predict

    return predict
