"""The plan of one run, for zero_recipes/checks/predicted.py: a line of JSON in, one out.

    python -m zero_recipes.tools.plan.of_run

{"predicted": what metrics.json carries, "lines": for the log, "findings": errors and warnings}
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero_recipes.config.row_lengths import RowLengths
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.core.process import end_with_parent
from zero_recipes.core.units import size
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.choose import changes_arithmetic
from zero_recipes.tools.plan.formulas import overheads
from zero_recipes.tools.plan.job import Job, model_config
from zero_recipes.tools.plan.predict import BY_FORMULAS, SOURCES, Predict, Predictor, fit_of

NAMED = 10**9  # bytes; less may be the process's own, by GPU and driver
STATUSES = {"fits": "fits into", "tight": "may run out of memory with", "no": "does not fit into"}
PLAIN_ADAM = ("adamw_torch", "adamw_torch_fused")


def main() -> None:
    """Answer the question on stdin with a line on stdout."""
    end_with_parent()
    question = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    from zero_recipes.engine.warnings import quieten

    quieten()
    answer = answer_of(question, Predictor(seconds=question["seconds"]))
    print(json.dumps(answer), file=answers, flush=True)


def answer_of(question: Mapping[str, Any], predict: Predict) -> dict[str, Any]:
    """Plan the run that asks: what metrics.json carries, lines for its log, and findings."""
    started = time.monotonic()
    try:
        job = _job(question)
        prediction = predict(job)
    except Refusal as refusal:  # no config of the model, or of no class that can be built
        return {"predicted": None, "lines": [f"no plan could be made: {refusal.what}"], "findings": []}
    peak = f"{size(prediction.allocated_peak_bytes)} at the peak, by {SOURCES[prediction.source]}"
    cards = question["cards"]
    findings = []
    if cards:
        fit = fit_of(prediction, min(map(left_of, cards)))
        peak += f": {STATUSES[fit.status]} {size(fit.capacity)}"
        findings = too_large(job, prediction, cards, question["recipe"])
    seconds = time.monotonic() - started
    why_formulas = [note for note in prediction.notes if BY_FORMULAS in note]
    return {
        "predicted": prediction.for_metrics.model_dump(mode="json"),
        "lines": [f"{peak}; it took {seconds:.0f} s", *why_formulas],
        "findings": [asdict(finding) for finding in findings],
    }


def _job(question: Mapping[str, Any]) -> Job:
    values = question["job"]
    settings = Settings(values["settings"])
    config = model_config(settings)
    job = Job(settings.model_name_or_path, config, **(values | {"settings": settings}))
    if settings.evaluates:
        rows = known_rows(job, question["recipe"])
        job = replace(job, evaluated=rows and rows.evaluated)
    return job


def known_rows(job: Job, recipe: str) -> RowLengths | None:
    """Read the lengths of the run's rows, where they are on this machine."""
    from zero_recipes.data.prepare import rows_at_hand  # imports datasets

    rows = rows_at_hand(job.settings, Path(recipe))
    return None if isinstance(rows, str) else rows


def rows_are_shorter(job: Job, recipe: str) -> bool:
    """Whether every row is known to be shorter than max_length."""
    if job.settings.packing:
        return False
    rows = known_rows(job, recipe)
    return rows is not None and max(rows.lengths) < (job.settings.max_length or 0)


def left_of(card: Mapping[str, Any]) -> int:
    """Bytes of a GPU that no other process uses. `card`: by checks/predicted.py."""
    own = card["reserved"] + overheads().beside_segments(card["ranks"])
    others = card["total"] - card["free"] - own
    return card["total"] - others if others >= NAMED else card["total"]


def _described(card: Mapping[str, Any]) -> str:
    return f"that of rank {card['rank']} on {card['host']} has {size(card['total'])}, {size(left_of(card))} of it free"


def too_large(job: Job, prediction: Prediction, cards: Sequence[Mapping[str, Any]], recipe: str) -> list[Finding]:
    """An error for model states larger than a whole GPU, which is certain, else for a run that does not fit.

    A warning by formulas, while no plan was compared with a GPU, and where all rows are shorter than the plan's.
    """
    about = {"strategy": job.strategy, "count": job.world_size, "recipe": recipe}
    states = certain_states(job, prediction)
    needed = sum(states.values())
    smallest = min(cards, key=lambda card: card["total"])
    if needed > smallest["total"]:
        return [finding("ZR840", **about, size=size(needed), card=_described(smallest), parts=_listed(states))]
    fullest = min(cards, key=left_of)
    if fit_of(prediction, left_of(fullest)).runs:
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
    """Bytes of model states that one GPU holds all at once.

    By formulas: of weights that nothing packs, and of torch's own Adam.
    """
    states = prediction.model_state_bytes
    if prediction.source == "engine":
        return {"weights": states.params, "gradients": states.grads, "optimizer": states.optimizer}
    if job.quantizes or job.zero.zero.get("zero_quantized_nontrainable_weights"):
        return {}
    certain = {"weights": states.params}
    block = job.zero.optimizer or {}
    is_plain = job.settings.optim in PLAIN_ADAM and block.get("type", "AdamW") in ("Adam", "AdamW")
    if is_plain and not changes_arithmetic(job):
        certain["optimizer"] = states.optimizer
    return certain


if __name__ == "__main__":
    main()
