"""The largest micro batch and the longest sequences that fit, by doubling and bisection with the same prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zero_recipes.plan.advice import Predict
from zero_recipes.plan.job import Job
from zero_recipes.plan.verdict import judge

MOST_SEQUENCES = 4096  # a micro batch beyond it gains nothing
LENGTH_STEP = 64  # tokens; tensor cores want multiples of it


def largest_micro_batch(job: Job, capacity: int, predict: Predict) -> int:
    """Sequences of the recipe's max_length in one micro batch; 0 where not even one fits."""
    return _largest(lambda size: _fits(job, capacity, predict, per_device_train_batch_size=size), MOST_SEQUENCES)


def longest_sequence(job: Job, capacity: int, predict: Predict) -> int:
    """Tokens, a multiple of 64, with the recipe's micro batch; 0 where not even 64 fit.

    No longer than the positions that the model's config has.
    """
    positions = job.config.get("max_position_embeddings") or job.config.get("n_positions") or 131072
    fits = lambda steps: _fits(job, capacity, predict, max_length=LENGTH_STEP * steps)  # noqa: E731
    return LENGTH_STEP * _largest(fits, positions // LENGTH_STEP)


def _fits(job: Job, capacity: int, predict: Predict, **values: int) -> bool:
    # a recipe's global_batch_size speaks of its own micro batch
    changed = dict(job.values) | {"global_batch_size": None} | values
    return judge(predict(replace(job, values=changed)), capacity).word == "fits"


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size up to `most` that fits, if whatever is smaller than a size that fits does so too."""
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
