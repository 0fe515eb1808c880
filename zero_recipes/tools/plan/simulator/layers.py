"""A large frozen model from a few of its layers: where all are alike, bytes are linear in their number."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_recipes.tools.plan.job import Job

MANY = 48
FEW = (2, 3, 4)  # the third shows whether the others tell
TOLERANCE = 0.001  # of the peak


def layers_to_simulate(job: "Job") -> tuple[int, ...]:
    """Numbers of layers; empty where the model is simulated as it is.

    Stage 3 keeps gathered layers up to a limit, which a few do not reach.
    """
    is_large = job.config.get("num_hidden_layers", 0) >= MANY
    if job.zero_stage == 3 or not (is_large and job.settings.use_peft):
        return ()
    for kinds in _by_layer(job).values():
        if any(kind != kinds[0] for kind in kinds):
            return ()
    return FEW


def _by_layer(job: "Job") -> dict[str, list[Any]]:
    """Keys of the config that have an entry for each layer."""
    total = job.config["num_hidden_layers"]
    lists = {key: value for key, value in job.config.items() if isinstance(value, list)}
    return {key: value for key, value in lists.items() if len(value) == total}


def with_layers(job: "Job", number: int) -> "Job":
    changes: dict[str, Any] = {key: kinds[:number] for key, kinds in _by_layer(job).items()}
    changes["num_hidden_layers"] = number
    return replace(job, config=job.config | changes)


def extrapolated(answers: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """From the `answers` to FEW, or of the whole model. An `error` where they do not lie on a line."""
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
            return {"error": f"{phase} of {FEW} layers is not linear in their number"}
    return _on_the_line(second, third, layers - FEW[1])


def _on_the_line(one: Any, other: Any, steps: int) -> Any:
    if isinstance(one, dict):
        return {name: _on_the_line(value, other[name], steps) for name, value in one.items()}
    return one + (other - one) * steps
