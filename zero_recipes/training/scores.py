"""How near an answer is to its reference. Words are separated by white space."""

from __future__ import annotations

import math
from collections import Counter

LARGEST_LOSS = math.log(1.7e308)  # nats; beyond it exp has no number


def exact_match(answer: str, reference: str) -> float:
    """1.0 for the same text, apart from white space at both ends."""
    return float(answer.strip() == reference.strip())


def token_f1(answer: str, reference: str) -> float:
    """F1 of the bags of words, as in SQuAD but case sensitive."""
    words, expected = answer.split(), reference.split()
    if not words and not expected:
        return 1.0
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def rouge(answer: str, reference: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) as F1, by rouge_score with Porter's stemmer; it reads a-z and digits."""
    from rouge_score import rouge_scorer

    kinds = ["rouge1", "rouge2", "rougeL"]
    scores = rouge_scorer.RougeScorer(kinds, use_stemmer=True).score(reference, answer)
    return {kind: float(scores[kind].fmeasure) for kind in kinds}


def perplexity(loss: float) -> float:
    """`loss`: mean nats per token."""
    return math.exp(loss) if loss <= LARGEST_LOSS else math.inf
