"""run_sft.py to which a signal comes: SIGNAL="RANK:NUMBER:NAME:WHOM" names the rank, and the call of PLACES in which it
sends itself or its launcher (WHOM) that signal. In a group of processes: `train_signalled`."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [os.environ["ROOT"]] if "ROOT" in os.environ else []

import run_sft  # noqa: E402
from tests.helpers.around import before  # noqa: E402

# what a run calls over and over, from its first step on: a batch of the training, the evaluation, the samples; a save
PLACES = ("training_step", "prediction_step", "generate_texts", "_save_rng_state")


@contextlib.contextmanager
def moments(number: int, name: str, whom: str = "self", place: str | None = None) -> Iterator[list[str]]:
    """The calls on this rank; in one of them the signal is sent. `place`: only calls of that name count."""
    from zero_recipes.training import samples, trainer

    calls: list[str] = []

    def count(called: str) -> None:
        if place in (None, called) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            calls.append(called)
            if len(calls) == number:
                if "SENT" in os.environ:
                    Path(os.environ["SENT"]).write_text(json.dumps({"in": called, "time": time.time()}))
                os.kill(os.getpid() if whom == "self" else os.getppid(), getattr(signal, name))

    with contextlib.ExitStack() as stack:
        for each in PLACES:
            owner = samples if each == "generate_texts" else trainer.ZeroSFTTrainer
            stack.enter_context(before(owner, each, lambda *_, each=each, **__: count(each)))
        yield calls


def train_signalled(argv: list[str], rank: int = 0, place: str = "", number: int = 0, name: str = "SIGTERM") -> str:
    """A run in this process group, to which a signal comes on one rank; how it has ended."""
    from zero_recipes.core import findings, process

    with moments(number if process.rank() == rank else 0, name, place=place):
        try:
            run_sft.train(run_sft.prepare(argv))
            return "done"
        except findings.Preempted as ending:
            return str(ending)


original = run_sft.train


def train(run):
    rank, number, name, whom = os.environ["SIGNAL"].split(":")
    with moments(int(number) if os.environ["RANK"] == rank else 0, name, whom) as calls:
        trainer = original(run)
    if os.environ["RANK"] == "0":
        Path(os.environ["SENT"]).write_text(json.dumps({"calls": len(calls)}))
    return trainer


if __name__ == "__main__":
    from zero_recipes.core.findings import Refusal, RunFailed, print_ending
    from zero_recipes.core.process import leave

    run_sft.train = train
    try:
        run_sft.main(sys.argv[1:])
    except (Refusal, RunFailed) as ending:
        leave(print_ending(ending))
    leave(0)
