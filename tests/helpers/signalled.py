"""A run in tests/helpers/group.py to which a signal comes. Through a launcher: tests/helpers/killed.py."""

import contextlib
import os
import signal

import run_sft
from tests.helpers.around import before
from zero_recipes.core import findings, process

# what a run calls over and over, from its first step on: a batch of the training, the evaluation, the samples; a save
PLACES = ("training_step", "prediction_step", "generate_texts", "_save_rng_state")


def train_signalled(
    argv: list[str], rank: int = 0, place: str | None = "", number: int = 0, name: str = "SIGTERM"
) -> str:
    """How it ends: in a call of PLACES on one rank the signal is sent. `place`: only calls of that name count."""
    from zero_recipes.training import samples, trainer

    calls = 0

    def count(called: str) -> None:
        nonlocal calls
        if place in (None, called) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            calls += 1
            if calls == number and process.rank() == rank:
                os.kill(os.getpid(), getattr(signal, name))

    with contextlib.ExitStack() as stack:
        for each in PLACES:
            owner = samples if each == "generate_texts" else trainer.ZeroSFTTrainer
            stack.enter_context(before(owner, each, lambda *_, each=each, **__: count(each)))
        try:
            run_sft.train(run_sft.prepare(argv))
            return "done"
        except findings.Preempted as ending:
            return str(ending)
