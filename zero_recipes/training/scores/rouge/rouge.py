"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004): words, pairs of words and the longest common sequence of words that
prediction and reference share, as F1. By rouge_score, with Porter's stemmer; it reads letters a-z and digits alone."""

import datasets
import evaluate
from rouge_score import rouge_scorer

_DESCRIPTION = "F1 of common words, pairs of words and longest common sequence; for each its mean and one value a row."
KINDS = ["rouge1", "rouge2", "rougeL"]


class Rouge(evaluate.Metric):
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
        scorer = rouge_scorer.RougeScorer(KINDS, use_stemmer=True)
        found = [scorer.score(wanted, said) for said, wanted in zip(predictions, references, strict=True)]
        each = {kind: [float(scores[kind].fmeasure) for scores in found] for kind in KINDS}
        return {kind: sum(values) / len(values) for kind, values in each.items()} | {"each": each}
