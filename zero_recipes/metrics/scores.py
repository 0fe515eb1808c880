"""How good answers are: our own scores, which need no network, and metrics of the evaluate library."""

import math
import numbers
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding, first_line, refusal

OWN = ("exact_match", "token_f1", "reference_loss")
# (answer, reference) on which metrics divide by zero
EMPTY = {"an empty answer": ("", "word"), "an empty reference": ("word", "")}


@dataclass(frozen=True)
class Metric:
    """A metric of the evaluate library, loaded."""

    name: str  # in `sample_metrics`
    module: Any
    keys: tuple[str, ...] = ()  # of its scores

    def scores(self, answer: str, reference: str) -> dict[str, float]:
        """The numbers that the metric gives for one answer. Raises what its code raises, which may be anything."""
        label = Path(self.name).stem
        scores = {}
        for key, value in self.module.compute(predictions=[answer], references=[reference]).items():
            if isinstance(value, numbers.Real):
                scores[key if key.startswith(label) else f"{label}.{key}"] = float(value)
        return scores


def load_metrics(settings: Settings) -> dict[str, Metric | None]:
    """Load the recipe's `sample_metrics`: {name: the metric, None for our own}. Raises Refusal for a missing one.

    A name without an owner is Hugging Face's. The code of others is not run unless it is trusted.
    """
    names = settings.sample_metrics or OWN
    if isinstance(names, str):
        names = [names]
    metrics: dict[str, Metric | None] = dict.fromkeys(names)
    for name in metrics.keys() - {*OWN}:
        if "/" in name and not settings.trust_remote_code:
            raise Refusal([replace(finding("ZR556", name=name), is_of_code_not_run=True)])
        try:
            import evaluate  # here: it takes seconds

            metric = Metric(name, evaluate.load(name, keep_in_memory=True))
            keys = tuple(metric.scores("word", "word"))
            if not keys:
                raise ValueError("it gives no number for one answer and its reference")
            metrics[name] = replace(metric, keys=keys)
        except Exception as error:  # a metric's code raises whatever it likes
            raise refusal("ZR555", name=name, error=" ".join(str(error).split())) from error
    return metrics


def metric_findings(metrics: Mapping[str, Metric | None]) -> Iterator[Finding]:
    """Try each metric on an empty answer and an empty reference, and warn of those that fail there."""
    for case, (answer, reference) in EMPTY.items():
        _, errors = scores_of(metrics, answer, reference, None)
        for name, error in errors.items():
            yield metric_finding(name, error, case)


def metric_finding(name: str, error: str, case: str) -> Finding:
    """The warning that a metric fails. `case`: for which answers."""
    return finding("ZR177", name=name, error=error, case=case)


def scores_of(
    metrics: Mapping[str, Metric | None], answer: str, reference: str, loss: float | None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Score one answer by all metrics. Nothing is raised here: the answers cost a whole training.

    `loss`: of the reference's tokens.
    Returns (number by score, None where it is not finite or its metric fails; by metric what it raised).

    exact_match: but for white space at both ends. token_f1: of bags of words, as SQuAD's but case sensitive.
    """
    words = answer.split()
    expected = reference.split()
    common = (Counter(words) & Counter(expected)).total()
    own = {
        "exact_match": answer.strip() == reference.strip(),
        "token_f1": 2 * common / (len(words) + len(expected)) if words or expected else 1.0,
        "reference_loss": math.nan if loss is None else loss,
    }
    scores: dict[str, float] = {}
    errors = {}
    for name, metric in metrics.items():
        if metric is None:
            scores[name] = float(own[name])
            continue
        try:
            scores |= metric.scores(answer, reference)
        except Exception as error:
            scores |= dict.fromkeys(metric.keys, math.nan)
            errors[name] = f"{type(error).__name__}: {first_line(error)}"
    return {key: value if math.isfinite(value) else None for key, value in scores.items()}, errors
