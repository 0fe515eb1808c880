"""Token F1: harmonic mean of precision and recall over white-space separated words, as in SQuAD but case sensitive."""

import collections

import datasets
import evaluate

_DESCRIPTION = "F1 of the bags of words of prediction and reference; mean and one value a row."


def token_f1(said: str, wanted: str) -> float:
    words, expected = said.split(), wanted.split()
    common = sum((collections.Counter(words) & collections.Counter(expected)).values())
    if not words and not expected:
        return 1.0
    return 2 * common / (len(words) + len(expected))


class TokenF1(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description="predictions and references: lists of strings of one length",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references):
        each = [token_f1(said, wanted) for said, wanted in zip(predictions, references, strict=True)]
        return {"token_f1": sum(each) / len(each), "each": each}
