"""The plan of one run, for zero_recipes/checks/predicted.py: a line of JSON in, one answer out.

    python -m zero_recipes.tools.plan.of_run

The answer: {"predicted": what metrics.json carries, "lines": for the log, "findings": errors and warnings}.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero_recipes.config.recipe import RowLengths, Settings
from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.core.process import end_with_parent
from zero_recipes.core.units import size
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.choose import changes_arithmetic
from zero_recipes.tools.plan.formulas import overheads
from zero_recipes.tools.plan.job import Job, model_config
from zero_recipes.tools.plan.predict import BY_FORMULAS, Predict, Predictor, fit_of

NAMED = 10**9  # bytes; less may be the process's own: contexts and communicators differ by GPU and driver
PLAIN_ADAM = ("adamw_torch", "adamw_torch_fused")
SOURCES = {"engine": "the simulated engine", "formulas": "textbook formulas"}
STATUSES = {"fits": "fits into", "tight": "tightly fits into", "no": "does not fit into"}


def main() -> None:
    end_with_parent()
    question = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    from zero_recipes.engine.warnings import quieten

    quieten()
    answer = answer_of(question, Predictor(seconds=question["seconds"]))
    print(json.dumps(answer), file=answers, flush=True)


def answer_of(question: Mapping[str, Any], predict: Predict) -> dict[str, Any]:
    started, settings = time.monotonic(), Settings(question["job"]["settings"])
    try:
        config = model_config(settings)
        job = Job(settings.model_name_or_path, config, **(question["job"] | {"settings": settings}))
        if settings.evaluates:
            rows = known_rows(job, question["recipe"])
            job = replace(job, evaluated=rows and rows.evaluated)
        prediction = predict(job)
    except Refusal as refusal:  # the model's config is not here, or is of no class that can be built
        return {"predicted": None, "lines": [f"no plan could be made: {refusal.what}"], "findings": []}
    lines, findings = [note for note in prediction.notes if BY_FORMULAS in note], []
    peak = f"{size(prediction.allocated_peak_bytes)} at the peak, by {SOURCES[prediction.source]}"
    if question["cards"]:
        fit = fit_of(prediction, min(map(left_of, question["cards"])))
        peak += f": {STATUSES[fit.status]} {size(fit.capacity)}"
        findings = too_large(job, prediction, question["cards"], question["recipe"])
    lines.insert(0, f"{peak}; it took {time.monotonic() - started:.0f} s")
    predicted = prediction.for_metrics.model_dump(mode="json")
    return {"predicted": predicted, "lines": lines, "findings": [asdict(found) for found in findings]}


def known_rows(job: Job, recipe: str) -> RowLengths | None:
    """The rows of the recipe, where they can be read."""
    from zero_recipes.data.prepare import rows_at_hand  # imports datasets

    found = rows_at_hand(job.settings, Path(recipe))
    return None if isinstance(found, str) else found


def rows_are_shorter(job: Job, recipe: str) -> bool:
    """Whether every row is known to be shorter than max_length, and none is packed with others."""
    rows = None if job.settings.packing else known_rows(job, recipe)
    return rows is not None and max(rows.lengths) < (job.settings.max_length or 0)


def left_of(card: Mapping[str, Any]) -> int:
    """Bytes of a GPU that no other process uses. `card`: by checks/predicted.py."""
    others = card["total"] - card["free"] - card["reserved"] - overheads().beside_segments(card["ranks"])
    return card["total"] - (others if others >= NAMED else 0)


def _described(card: Mapping[str, Any]) -> str:
    return f"that of rank {card['rank']} on {card['host']} has {size(card['total'])}, {size(left_of(card))} of it free"


def too_large(job: Job, prediction: Prediction, cards: Sequence[Mapping[str, Any]], recipe: str) -> list[Finding]:
    """The run whose model states are larger than a whole GPU, which is certain; or that does not fit: a warning by
    formulas, while no plan was compared with a GPU, and where all rows are shorter than the plan's."""
    states = certain_states(job, prediction)
    about = {"strategy": job.strategy, "count": job.world_size, "recipe": recipe}
    smallest, fullest = min(cards, key=lambda card: card["total"]), min(cards, key=left_of)
    if sum(states.values()) > smallest["total"]:
        needed = size(sum(states.values()))
        return [finding("ZR840", **about, size=needed, card=_described(smallest), parts=_listed(states))]
    if fit_of(prediction, left_of(fullest)).status != "no":
        return []
    is_certain = prediction.source == "engine" and overheads().measured and not rows_are_shorter(job, recipe)
    largest = sorted(prediction.at_peak.items(), key=lambda part: -part[1])[:3]
    return [
        finding(
            "ZR816",
            **about,
            size=size(prediction.reserved_bytes.low),
            card=_described(fullest),
            source=SOURCES[prediction.source],
            peak_phase=prediction.peak_phase,
            at_peak=_listed(dict(largest)),
            level="error" if is_certain else "warning",
        )
    ]


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(taken)}" for name, taken in parts.items() if taken)


def certain_states(job: Job, prediction: Prediction) -> dict[str, int]:
    """Bytes of model states that one GPU holds all at once: those that the simulated engine has allocated; by formulas
    weights that nothing packs and the states of torch's own Adam."""
    states = prediction.model_state_bytes
    if prediction.source == "engine":
        return {"weights": states.params, "gradients": states.grads, "optimizer": states.optimizer}
    if job.quantizes or job.zero.zero.get("zero_quantized_nontrainable_weights"):
        return {}
    by_deepspeed = ((job.ds_config or {}).get("optimizer") or {}).get("type", "AdamW") not in ("Adam", "AdamW")
    is_plain_adam = job.settings.optim in PLAIN_ADAM and not by_deepspeed and not changes_arithmetic(job)
    return {"weights": states.params, "optimizer": states.optimizer if is_plain_adam else 0}


if __name__ == "__main__":
    main()
