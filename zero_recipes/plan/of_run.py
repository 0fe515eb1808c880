"""The plan of one run, for zero_recipes/checks/predicted.py: a line of JSON in, the rows' lengths, one answer out.

    python -m zero_recipes.plan.of_run

The answer: {"predicted": what metrics.json carries, "lines": for the log, "findings": errors and warnings}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.core.host import Host, gpu_of_device
from zero_recipes.core.process import end_with_parent
from zero_recipes.core.units import size
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan import messages
from zero_recipes.plan.choose import changes_arithmetic, smallest_change
from zero_recipes.plan.cost import estimate
from zero_recipes.plan.formulas import overheads, predict_by_formulas
from zero_recipes.plan.job import Job, model_config, run_command, strategies_here
from zero_recipes.plan.predict import BY_FORMULAS, Predict, Predictor, fit_of

NAMED = 10**9  # bytes; less may be the process's own: contexts and communicators differ by GPU and driver
PLAIN_ADAM = ("adamw_torch", "adamw_torch_fused")


def main() -> None:
    end_with_parent()
    question = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    from zero_recipes.libs.warnings import quieten

    quieten()
    answer = answer_of(question, Predictor(seconds=question["seconds"]), sys.stdin.readline)
    print(json.dumps(answer), file=answers, flush=True)


def answer_of(question: Mapping[str, Any], predict: Predict, rows: Any) -> dict[str, Any]:
    """`rows`: waits for the lengths of the prepared rows, as JSON."""
    started = time.monotonic()
    written = question["job"]
    settings = Settings(written["settings"])
    try:
        config = model_config(settings)
        job = Job(settings.model_name_or_path, config, **(written | {"settings": settings}))
        plan = _Plan(job, Path(question["recipe"]), [Card.of(card) for card in question["cards"]], predict)
        findings = plan.states_alone(predict_by_formulas(job))  # certain: nothing is simulated but what helps
        if findings:
            return {"predicted": None, "lines": [], "findings": [asdict(found) for found in findings]}
        prediction = predict(job)
    except Refusal as refusal:  # the model's config is not here, or is of no class that can be built
        return {"predicted": None, "lines": [f"plan          none could be made: {refusal.what}"], "findings": []}
    findings = plan.states_alone(prediction) or plan.too_large(prediction)
    fit = fit_of(prediction, plan.fullest.left) if plan.cards else None
    lines = [f"plan          {messages.peak(prediction, fit)}; it took {time.monotonic() - started:.0f} s"]
    lines += [f"plan          {note}" for note in prediction.notes if BY_FORMULAS in note]
    lines += _speed(job, prediction, json.loads(rows() or "null"))
    predicted = prediction.for_metrics.model_dump(mode="json")
    return {"predicted": predicted, "lines": lines, "findings": [asdict(found) for found in findings]}


def _speed(job: Job, prediction: Prediction, rows: dict[str, Any] | None) -> list[str]:
    if rows is None:
        return []
    gpu, lengths = gpu_of_device(rows["device"]), RowLengths(**rows["lengths"])
    return [f"plan          {messages.speed(estimate(job, prediction, gpu, rows=lengths), lengths, gpu)}"]


@dataclass(frozen=True)
class Card:
    """The GPU of one rank. `total`: bytes; `others`: bytes of it that other processes use."""

    rank: int
    host: str
    total: int
    others: int

    @classmethod
    def of(cls, seen: Mapping[str, Any]) -> Card:
        """`seen`: by checks/predicted.py `card`."""
        own = seen["reserved"] + overheads().beside_segments(seen["ranks"])
        others = max(0, seen["total"] - seen["free"] - own)
        return cls(seen["rank"], seen["host"], seen["total"], others if others >= NAMED else 0)

    @property
    def left(self) -> int:
        """Bytes that this rank may take."""
        return self.total - self.others

    def __str__(self) -> str:
        held = f", {size(self.others)} of it held by other processes" if self.others else ""
        return f"rank {self.rank}'s on {self.host} has {size(self.total)}{held}"


@dataclass(frozen=True)
class _Plan:
    """`cards`: of all ranks; none where the run is compared with none."""

    job: Job
    recipe: Path
    cards: Sequence[Card]
    predict: Predict

    @property
    def fullest(self) -> Card:
        return min(self.cards, key=lambda card: card.left)

    def states_alone(self, prediction: Prediction) -> list[Finding]:
        """The run whose model states are larger than a whole GPU: certain, whatever a plan leaves out."""
        states = certain_states(self.job, prediction)
        smallest = min(self.cards, key=lambda card: card.total, default=None)
        if smallest is None or sum(states.values()) <= smallest.total:
            return []
        return [
            finding(
                "ZR840",
                strategy=self.job.strategy,
                gpus=self._gpus,
                size=size(sum(states.values())),
                card=smallest,
                parts=_listed(states),
                what_helps=self._what_helps(prediction, smallest.total),
            )
        ]

    def too_large(self, prediction: Prediction) -> list[Finding]:
        """The run that does not fit, with what would. By formulas, and while no GPU was compared with, a warning."""
        if not self.cards or fit_of(prediction, self.fullest.left).status != "no":
            return []
        sure = prediction.source == "engine" and overheads().measured
        missing = "no plan has been compared with a GPU yet" if prediction.source == "engine" else "formulas are coarse"
        return [
            finding(
                "ZR816",
                strategy=self.job.strategy,
                gpus=self._gpus,
                size=size(prediction.reserved_bytes.low),
                card=self.fullest,
                source=messages.SOURCES[prediction.source],
                peak_phase=prediction.peak_phase,
                at_peak=_listed(dict(sorted(prediction.at_peak.items(), key=lambda part: -part[1])[:3])),
                unsure="" if sure else f" Not certain: {missing}.",
                end_others="End what else runs on that GPU (nvidia-smi names it). " if self.fullest.others else "",
                what_helps=self._what_helps(prediction, self.fullest.left),
                level="error" if sure else "warning",
            )
        ]

    def _what_helps(self, prediction: Prediction, capacity: int) -> str:
        job, strategies = self.job, strategies_here() | {self.job.strategy: self.job.ds_config}
        predict: Predict = lambda other: prediction if other is job else self.predict(other)  # noqa: E731
        change = smallest_change(job, capacity, predict, strategies, Host().memory()[0])
        if change is None:
            return "No change that was tried makes it fit: a smaller model, or GPUs with more memory."
        # the configuration came from the launcher or the command line: a command names its own
        settings = job.settings.replace(deepspeed=None)
        words = messages.change_in_words(change)
        source = " (by formulas)" if change.prediction.source == "formulas" else ""
        command = run_command(self.recipe, settings, [], change.job)
        return f"{words[0].upper()}{words[1:]}{source}, with the other options of this run: {command}."

    @property
    def _gpus(self) -> str:
        return f"{self.job.world_size} GPU{'s' if self.job.world_size > 1 else ''}"


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
