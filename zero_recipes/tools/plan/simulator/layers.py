"""A large frozen model from a few of its layers: where all are alike, bytes are linear in their number."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_recipes.tools.plan.job import Job

MANY = 16
NOT_LINEAR = "is not linear in their number"
FEW = (2, 3, 4)  # the third shows whether the others tell
TOLERANCE = 0.001  # of the peak


def layers_to_simulate(job: "Job") -> tuple[int, ...]:
    """Choose the numbers of layers to simulate; empty where the model is simulated as it is.

    Stage 3 keeps gathered layers up to a limit, which a few do not reach.
    """
    layers = job.config.get("num_hidden_layers", 0)
    if job.zero_stage == 3 or layers < MANY or not job.settings.use_peft:
        return ()
    for kinds in entries_by_layer(job.config, layers).values():
        if any(kind != kinds[0] for kind in kinds):
            return ()
    return FEW


def entries_by_layer(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """Keys of a model's config whose lists have an entry for each layer: they say of which kind it is."""
    lists = {key: value for key, value in config.items() if isinstance(value, list)}
    return {key: value for key, value in lists.items() if len(value) == layers}


def with_layers(job: "Job", number: int) -> "Job":
    """The same job with so many of its model's layers."""
    changes: dict[str, Any] = {"num_hidden_layers": number}
    for key, kinds in entries_by_layer(job.config, job.config["num_hidden_layers"]).items():
        changes[key] = kinds[:number]
    return replace(job, config=job.config | changes)


def extrapolated(answers: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Extend the `answers` for a few layers to all of them, or take that for the whole model.

    An `error` with NOT_LINEAR where they do not lie on a line.
    """
    for answer in answers:
        if "error" in answer:
            return answer
    if len(answers) == 1:  # of the whole model
        return answers[0]
    first, second, third = answers
    most = max(second["peaks"].values())
    for phase, peak in second["peaks"].items():
        bend = first["peaks"][phase] + third["peaks"][phase] - 2 * peak
        if abs(bend) > TOLERANCE * most:
            return {"error": f"{phase} of {FEW} layers {NOT_LINEAR}"}
    return _on_the_line(second, third, layers - FEW[1])


def _on_the_line(one: Any, other: Any, steps: int) -> Any:
    if isinstance(one, dict):
        return {name: _on_the_line(value, other[name], steps) for name, value in one.items()}
    return one + (other - one) * steps
