"""The largest micro batch and the longest sequences that fit: growing steps and bisection, by the same prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zero_recipes.planner.advice import Predict
from zero_recipes.planner.job import Job
from zero_recipes.planner.verdict import judge

MOST_SEQUENCES = 4096  # a micro batch beyond it gains nothing
LENGTH_STEP = 64  # tokens; tensor cores want multiples of it


def largest_micro_batch(job: Job, capacity: int, predict: Predict, start: int = 1) -> int:
    """Sequences of the recipe's max_length in one micro batch; 0 where not even one fits. `start`: a guess."""
    return _largest(lambda size: _fits(job, capacity, predict, per_device_train_batch_size=size), MOST_SEQUENCES, start)


def longest_sequence(job: Job, capacity: int, predict: Predict, start: int = LENGTH_STEP) -> int:
    """Tokens, a multiple of 64, with the recipe's micro batch; 0 where not even 64 fit. `start`: a guess.

    No longer than the positions that the model's config has.
    """
    positions = job.config.get("max_position_embeddings") or job.config.get("n_positions") or 131072
    fits = lambda steps: _fits(job, capacity, predict, max_length=LENGTH_STEP * steps)  # noqa: E731
    return LENGTH_STEP * _largest(fits, positions // LENGTH_STEP, start // LENGTH_STEP)


def _fits(job: Job, capacity: int, predict: Predict, **values: int) -> bool:
    # a recipe's global_batch_size speaks of its own micro batch
    changed = job.settings.replace(global_batch_size=None, **values)
    return judge(predict(replace(job, settings=changed)), capacity).word == "fits"


def _largest(fits: Callable[[int], bool], most: int, start: int) -> int:
    """The largest size up to `most` that fits, if whatever is smaller than a size that fits does so too; 0 for none.

    From `start` in growing steps, then by bisection: near a good guess few sizes are asked about.
    """
    good, bad, step = 0, most + 1, max(1, start // 8)
    size = min(max(start, 1), most)
    while good < size < bad:
        if fits(size):
            good = size
            size = min(good + step, most)
        else:
            bad = size
            size = max(bad - step, 1)
        step *= 2
        if good and bad <= most:
            break
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
