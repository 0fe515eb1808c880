"""The plan of one run, for zero_recipes/checks/predicted.py: a line of JSON in, the rows' lengths, one answer out.

    python -m zero_recipes.plan.of_run

The answer: {"predicted": what metrics.json carries, "lines": for the log, "findings": errors and warnings}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero_recipes.config.recipe import Settings
from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.core.host import Host, gpu_of_device
from zero_recipes.core.process import end_with_parent
from zero_recipes.core.units import count, percent, significant, size
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.schema import Prediction
from zero_recipes.plan.choose import changes_arithmetic, smallest_change
from zero_recipes.plan.cost import estimate
from zero_recipes.plan.formulas import overheads
from zero_recipes.plan.job import Job, model_config, run_command, strategies_here
from zero_recipes.plan.output import change_in_words
from zero_recipes.plan.predict import BY_FORMULAS, Predict, Predictor, fit_of

NAMED = 10**9  # bytes; less may be the process's own: contexts and communicators differ by GPU and driver
PLAIN_ADAM = ("adamw_torch", "adamw_torch_fused")
SOURCES = {"engine": "the engine, simulated", "formulas": "textbook formulas"}
STATUSES = {"fits": "fits into", "tight": "tight in", "no": "does not fit into"}


def main() -> None:
    end_with_parent()
    question = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    from zero_recipes.libs.warnings import quieten

    quieten()
    answer = answer_of(question, Predictor(seconds=question["seconds"]), sys.stdin.readline)
    print(json.dumps(answer), file=answers, flush=True)


def answer_of(question: Mapping[str, Any], predict: Predict, rows: Callable[[], str]) -> dict[str, Any]:
    """`rows`: waits for the lengths of the prepared rows, as JSON."""
    started, written = time.monotonic(), question["job"]
    settings = Settings(written["settings"])
    try:
        config = model_config(settings)
        job = Job(settings.model_name_or_path, config, **(written | {"settings": settings}))
        prediction = predict(job)
    except Refusal as refusal:  # the model's config is not here, or is of no class that can be built
        return {"predicted": None, "lines": [f"none could be made: {refusal.what}"], "findings": []}
    lines, findings = [note for note in prediction.notes if BY_FORMULAS in note], []
    peak = f"{size(prediction.allocated_peak_bytes)} at the peak, by {SOURCES[prediction.source]}"
    if question["cards"]:
        cards = question["cards"]
        fit = fit_of(prediction, min(map(left_of, cards)))
        peak += f": {STATUSES[fit.status]} {size(fit.capacity)}"
        findings = too_large(job, prediction, cards, lambda capacity: _what_helps(question, job, capacity, predict))
    lines.insert(0, f"{peak}; it took {time.monotonic() - started:.0f} s")
    lines += _speed(job, prediction, json.loads(rows() or "null"))
    predicted = prediction.for_metrics.model_dump(mode="json")
    return {"predicted": predicted, "lines": lines, "findings": [asdict(found) for found in findings]}


def _speed(job: Job, prediction: Prediction, rows: dict[str, Any] | None) -> list[str]:
    gpu = rows and gpu_of_device(rows["device"])
    if gpu is None:
        return []
    lengths = RowLengths(**rows["lengths"])
    found = estimate(job, prediction, gpu, rows=lengths)
    seconds, mfu = " to ".join(map(significant, found.step_seconds)), " to ".join(map(percent, found.mfu))
    tokens = " to ".join(map(count, found.tokens_per_second))
    of_rows = f"{lengths.source}, {lengths.mean:,.0f} tokens on average"
    return [f"{gpu.name}: {seconds} s a step, {tokens} real tokens/s, MFU {mfu}: estimated for {of_rows}"]


def left_of(card: Mapping[str, Any]) -> int:
    """Bytes of a GPU that no other process uses. `card`: by checks/predicted.py."""
    others = card["total"] - card["free"] - card["reserved"] - overheads().beside_segments(card["ranks"])
    return card["total"] - (others if others >= NAMED else 0)


def _described(card: Mapping[str, Any]) -> str:
    return f"rank {card['rank']}'s on {card['host']} has {size(card['total'])}, {size(left_of(card))} of it free"


def too_large(
    job: Job, prediction: Prediction, cards: Sequence[Mapping[str, Any]], what_helps: Callable[[int], str]
) -> list[Finding]:
    """The run whose model states are larger than a whole GPU, which is certain; or that does not fit: by formulas, and
    while no plan was compared with a GPU, a warning."""
    states = certain_states(job, prediction)
    smallest = min(cards, key=lambda card: card["total"])
    about = {"strategy": job.strategy, "gpus": f"{job.world_size} GPUs"}
    if sum(states.values()) > smallest["total"]:
        about |= {"size": size(sum(states.values())), "card": _described(smallest), "parts": _listed(states)}
        return [finding("ZR840", **about, what_helps=what_helps(smallest["total"]))]
    fullest = min(cards, key=left_of)
    if fit_of(prediction, left_of(fullest)).status != "no":
        return []
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
            what_helps=what_helps(left_of(fullest)),
            level="error" if prediction.source == "engine" and overheads().measured else "warning",
        )
    ]


def _what_helps(question: Mapping[str, Any], job: Job, capacity: int, predict: Predict) -> str:
    strategies = strategies_here() | {job.strategy: job.ds_config}
    change = smallest_change(job, capacity, predict, strategies, Host().memory()[0])
    if change is None:
        return "No change that was tried makes it fit: a smaller model, or GPUs with more memory."
    # the configuration came from the launcher or the command line: a command names its own
    command = run_command(Path(question["recipe"]), job.settings.replace(deepspeed=None), [], change.job)
    return f"What would fit, with the other options of this run, is {change_in_words(change)}: {command}."


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(taken)}" for name, taken in parts.items() if taken)


def certain_states(job: Job, prediction: Prediction) -> dict[str, int]:
    """Bytes of model states that one GPU holds all at once, by part.

    The simulated engine has allocated them. By formulas: weights that nothing packs, and the states of torch's own
    Adam; gradients come and go.
    """
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
