"""Perplexity of texts under a model that is loaded already: exp of the mean negative log-likelihood of a token.

The hub's module of this name downloads and loads the model itself; this one is given its losses.
"""

import math

import datasets
import evaluate

_DESCRIPTION = "exp(mean loss) over all tokens, each counted once, and of each row alone."
LARGEST = math.log(1.7e308)  # nats; beyond it no number is left


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss <= LARGEST else math.inf


class Perplexity(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description="losses: mean nats per token of each row; tokens: how many tokens each mean is over",
            features=datasets.Features({"losses": datasets.Value("float64"), "tokens": datasets.Value("int64")}),
        )

    def _compute(self, losses, tokens):
        whole = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        return {"perplexity": perplexity(whole), "each": [perplexity(loss) for loss in losses]}
