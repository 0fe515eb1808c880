"""The rules of thumb by parameter count, beside what this recipe really needs, and where they fail."""

from __future__ import annotations

from collections.abc import Sequence

from zero_recipes.plan.planning import Row
from zero_recipes.report.units import parameters, size

# (below so many parameters, the strategy that is commonly named for them)
RULES = ((10e9, "ddp"), (50e9, "zero2"), (float("inf"), "zero3"))


def beside(rows: Sequence[Row]) -> list[str]:
    """What the common rule says for this model, and whether it holds on these GPUs."""
    psi = rows[0].prediction["parameters"]
    name = next(strategy for limit, strategy in RULES if psi < limit)
    said = f"A common rule: {name} for a model of {parameters(psi)} parameters (ddp below 10, zero2 up to 50 billion)."
    row = next((row for row in rows if row.job.strategy == name or (name, row.job.strategy) == ("ddp", "single")), None)
    if row is None:
        return [said]
    needs = size(row.prediction["reserved_bytes"]["high"])
    if row.verdict.word == "fits":
        return [f"{said} Here it fits: {needs} at most."]
    return [
        f"{said} Here it {'may not fit' if row.verdict.word == 'tight' else 'does not fit'}: up to {needs} on a GPU of "
        f"{size(row.verdict.capacity)}. The rule leaves out the number of GPUs, their memory and the activations."
    ]
