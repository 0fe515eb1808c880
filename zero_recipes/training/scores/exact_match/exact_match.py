"""Exact match: the answer is the reference, apart from white space at both ends."""

import datasets
import evaluate

_DESCRIPTION = "1.0 where prediction and reference are the same text after strip(), else 0.0; mean and one value a row."


class ExactMatch(evaluate.Metric):
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
        each = [float(said.strip() == wanted.strip()) for said, wanted in zip(predictions, references, strict=True)]
        return {"exact_match": sum(each) / len(each), "each": each}
