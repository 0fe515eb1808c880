"""How good answers are: our own scores, which need no network, and metrics of the evaluate library."""

import math
import numbers
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_recipes.config.recipe import Settings
from zero_recipes.core.findings import Refusal, finding, refusal

OWN = ("exact_match", "token_f1", "reference_loss")


def load_metrics(settings: Settings) -> dict[str, Any]:
    """{name in `sample_metrics`: evaluate's module, None for our own}. Raises Refusal for one that cannot be had.

    A name without an owner is Hugging Face's. The code of others is not run unless it is trusted.
    """
    names = settings.sample_metrics or OWN
    if isinstance(names, str):
        names = [names]
    metrics = dict.fromkeys(names)
    for name in metrics.keys() - {*OWN}:
        if "/" in name and not settings.trust_remote_code:
            raise Refusal([replace(finding("ZR556", name=name), is_of_code_not_run=True)])
        try:
            import evaluate  # here: it takes seconds

            metrics[name] = evaluate.load(name, keep_in_memory=True)
            if not scores_of({name: metrics[name]}, "word", "word", None):
                raise ValueError("it gives no number for one answer and its reference")
        except Exception as error:  # a metric's code raises whatever it likes
            raise refusal("ZR555", name=name, error=" ".join(str(error).split())) from error
    return metrics


def scores_of(metrics: Mapping[str, Any], answer: str, reference: str, loss: float | None) -> dict[str, float | None]:
    """By score; None where it is not finite. `loss`: of the reference's tokens.

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
    scores = {}
    for name, metric in metrics.items():
        if metric is None:
            scores[name] = float(own[name])
            continue
        label = Path(name).stem
        for key, value in metric.compute(predictions=[answer], references=[reference]).items():
            if isinstance(value, numbers.Real):
                scores[key if key.startswith(label) else f"{label}.{key}"] = float(value)
    return {key: value if math.isfinite(value) else None for key, value in scores.items()}
