"""A large frozen model from a few of its layers: where all are alike, bytes are linear in their number."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_recipes.tools.plan.job import Job

MANY = 48
FEW = (4, 6, 8)  # enough that stage 3 has gathered all that it keeps; the third shows whether the others tell
TOLERANCE = 0.001


def layers_to_simulate(job: "Job") -> tuple[int, ...]:
    """Numbers of layers; empty where the model is simulated as it is."""
    total = job.config.get("num_hidden_layers", 0)
    is_large = total >= MANY
    if is_large and job.settings.use_peft and all(_are_alike(kinds) for kinds in _by_layer(job).values()):
        return FEW
    return ()


def _by_layer(job: "Job") -> dict[str, list[Any]]:
    """Keys of the config that have an entry for each layer."""
    total = job.config["num_hidden_layers"]
    found = {}
    for key, value in job.config.items():
        if isinstance(value, list) and len(value) == total:
            found[key] = value
    return found


def _are_alike(kinds: list[Any]) -> bool:
    return all(kind == kinds[0] for kind in kinds)


def with_layers(job: "Job", number: int) -> "Job":
    changes: dict[str, Any] = {"num_hidden_layers": number}
    for key, kinds in _by_layer(job).items():
        changes[key] = kinds[:number]
    return replace(job, config=job.config | changes)


def extrapolated(answers: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Of so many layers, from the `answers` to FEW. An `error` where they do not lie on a line."""
    for answer in answers:
        if "error" in answer:
            return answer
    first, second, third = answers
    for phase, peak in second["peaks"].items():
        bend = first["peaks"][phase] + third["peaks"][phase] - 2 * peak
        if abs(bend) > TOLERANCE * peak:
            return {"error": f"{phase} of {FEW} layers is not linear in their number"}
    return _on_the_line(second, third, (layers - FEW[1]) / (FEW[2] - FEW[1]))


def _on_the_line(one: Any, other: Any, steps: float) -> Any:
    if isinstance(one, dict):
        return {name: _on_the_line(value, other[name], steps) for name, value in one.items()}
    return one + round((other - one) * steps)
