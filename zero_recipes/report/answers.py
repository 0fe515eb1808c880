"""What fine-tuning did to the answers: mean scores before and after, and whether they are better."""

from collections.abc import Sequence
from statistics import fmean

from zero_recipes.metrics.read_runs import MeasuredRun, SampleRow

LOWER_IS_BETTER = {"reference_loss"}
JUDGED = ("exact_match", "token_f1", "reference_loss")


def sampled_run(runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The run whose answers are shown: a full run where there is one, otherwise the last that has samples."""
    with_samples = [run for run in runs if run.samples]
    full = [run for run in with_samples if not run.compared and run.swept is None]
    return (full or with_samples or [None])[-1]


def mean_scores(samples: Sequence[SampleRow]) -> dict[str, tuple[float, float]]:
    """For each metric its mean before and after, over the prompts scored both times."""
    means = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.scores_before):
        pairs = [(sample.scores_before.get(name), sample.scores_after.get(name)) for sample in samples]
        both = [(before, after) for before, after in pairs if before is not None and after is not None]
        if both:
            means[name] = (fmean(before for before, _ in both), fmean(after for _, after in both))
    return means


def judge_answers(runs: Sequence[MeasuredRun]) -> tuple[str, str, str, str, str]:
    """Question, verdict, measured, claimed, right: yes only where no score is worse, no where none is better."""
    question = "Did fine-tuning make the answers better?"
    claimed = "A base model only continues text; after a few hundred to a few thousand steps it follows instructions."
    right = (
        "A handful of greedy answers shows style, not quality. The loss on the reference answers is the steadiest of "
        "these scores; exact match stays near zero where many answers are right."
    )
    run = sampled_run(runs)
    answered = [sample for sample in run.samples if None not in (sample.before, sample.after)] if run else []
    if not answered:
        return question, "cannot tell", "No run has answers from before and after training.", claimed, right
    means = mean_scores(answered)
    changed = sum(sample.before != sample.after for sample in answered)
    listed = "; ".join(f"{name} {before:.3f} to {after:.3f}" for name, (before, after) in means.items())
    measured = f"{run.label}: {changed} of {len(answered)} answers changed. Mean {listed or 'scores missing'}."
    gains = [_gain(name, *means[name]) for name in JUDGED if name in means]
    return question, _verdict(gains), measured, claimed, right


def _gain(name: str, before: float, after: float) -> float:
    """Above zero where the score improved."""
    return before - after if name in LOWER_IS_BETTER else after - before


def _verdict(gains: Sequence[float]) -> str:
    if not gains:
        return "cannot tell"
    if not any(gain > 0 for gain in gains):
        return "no"
    return "cannot tell" if any(gain < 0 for gain in gains) else "yes"
