"""Both sides answer the same prompts, one after the other, and are scored alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.progress import track

from zero_recipes.ask.load import Loaded
from zero_recipes.core.tables import terminal
from zero_recipes.data.samples import Sample
from zero_recipes.metrics.read_runs import SampleRow
from zero_recipes.training.generation import generate_texts, reference_losses
from zero_recipes.training.samples import TEXT_SCORES, Answers, score, why_unscored
from zero_recipes.training.scores import perplexity, rouge

SCORES = (*TEXT_SCORES, rouge)


@dataclass(frozen=True)
class Asked:
    """Rows of samples.jsonl, `before` being the base, and each score over all of them: {name: (base, model)}."""

    rows: list[SampleRow]
    means: dict[str, tuple[float | None, float]]
    scored: int  # rows with a reference


def answer_all(loaded: Loaded, samples: list[Sample], max_new_tokens: int, batch: int, who: str) -> Answers:
    """Greedy answers and reference losses of one model, `batch` prompts at a time as its run took them."""
    texts: list[str] = []
    losses: list[float | None] = []
    console = terminal(stderr=True)
    batches = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    shown = {"console": console, "transient": True, "disable": not console.is_terminal}
    for part in track(batches, f"{who} answers", **shown):
        with loaded.computing():
            texts += generate_texts(loaded.model, loaded.tokenizer, part, max_new_tokens, loaded.device)
            losses += reference_losses(loaded.model, loaded.tokenizer, part, loaded.device)
    return Answers(texts, losses)


def compare(samples: list[Sample], base: Answers | None, tuned: Answers) -> Asked:
    """All scores of both. `base`: None where the model was asked alone."""
    sides = [None if side is None else _scores(samples, side) for side in (base, tuned)]
    rows = []
    for i, sample in enumerate(samples):
        losses = [side.reference_losses[i] for side in (base, tuned) if side is not None]
        rows.append(
            SampleRow(
                prompt=sample.prompt,
                before=None if base is None else base.texts[i],
                after=tuned.texts[i],
                reference=sample.reference,
                scores_before={} if sides[0] is None else sides[0][i],
                scores_after=sides[1][i],
                unscored=why_unscored(sample, losses),
            )
        )
    referenced = sum(sample.reference is not None for sample in samples)
    return Asked(rows, means(rows, [_tokens(sample) for sample in samples]), referenced)


def means(rows: Sequence[SampleRow], tokens: Sequence[int]) -> dict[str, tuple[float | None, float]]:
    """{score: (base, model)} over the rows that have it on every side; perplexity over all tokens of the references.

    `tokens`: of the reference of each row, those that carry loss.
    """
    alone = all(row.before is None for row in rows)
    found: dict[str, tuple[float | None, float]] = {}
    for name in dict.fromkeys(name for row in rows for name in row.scores_after):
        both = [
            (row.scores_before.get(name), row.scores_after[name], count)
            for row, count in zip(rows, tokens, strict=True)
            if row.scores_after.get(name) is not None and (alone or row.scores_before.get(name) is not None)
        ]
        if not both:
            continue
        if name == "reference_loss":
            counts = [count for *_, count in both]
            sides = [None if alone else [before for before, *_ in both], [after for _, after, _ in both]]
            found[name] = tuple(None if side is None else fmean(side) for side in sides)
            found["perplexity"] = tuple(None if side is None else perplexities(side, counts)[0] for side in sides)
        elif name != "perplexity":
            before = None if alone else fmean(value for value, *_ in both)
            found[name] = (before, fmean(value for _, value, _ in both))
    return found


def perplexities(losses: list[float], tokens: list[int]) -> tuple[float, list[float]]:
    """(of all tokens together, of each row)."""
    mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    return perplexity(mean), [perplexity(loss) for loss in losses]


def _scores(samples: list[Sample], answers: Answers) -> list[dict[str, float | None]]:
    scores = score(samples, answers, SCORES)
    known = [i for i, row in enumerate(scores) if row.get("reference_loss") is not None]
    if known:
        _, each = perplexities([scores[i]["reference_loss"] for i in known], [_tokens(samples[i]) for i in known])
        for i, value in zip(known, each, strict=True):
            scores[i]["perplexity"] = value if math.isfinite(value) else None
    return scores


def _tokens(sample: Sample) -> int:
    return sum(label != -100 for label in sample.labels[1:])
