"""run_sft.py to which a signal comes: SIGNAL="RANK:NUMBER:NAME:WHOM" names the rank, and the call of PLACES in which it
sends itself or its launcher (WHOM) that signal. In a group of processes: `train_signalled`."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

sys.path[:0] = [os.environ["ROOT"]] if "ROOT" in os.environ else []

import run_sft  # noqa: E402

# what a run calls over and over, from its first step on: a batch of the training, the evaluation, the samples; a save
PLACES = ("training_step", "prediction_step", "generate_texts", "_save_rng_state")


class Moments:
    """Counts the calls on this rank, and sends the signal in one of them. `place`: only calls of that name count."""

    def __init__(self, number: int, name: str, whom: str = "self", place: str | None = None):
        self.number, self.name, self.whom, self.place = number, name, whom, place
        self.calls: list[str] = []

    def __enter__(self):
        from zero_recipes.training import samples, trainer

        self.patches = []
        for name in PLACES:
            owner = samples if name == "generate_texts" else trainer.ZeroSFTTrainer
            self.patches.append(mock.patch.object(owner, name, self._counted(getattr(owner, name), name)))
            self.patches[-1].start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()

    def _counted(self, original, name: str):
        def counted(*arguments, **keywords):
            if self.place in (None, name) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                self.calls.append(name)
                if len(self.calls) == self.number:
                    self._send()
            return original(*arguments, **keywords)

        return counted

    def _send(self) -> None:
        if "SENT" in os.environ:
            Path(os.environ["SENT"]).write_text(json.dumps({"in": self.calls[-1], "time": time.time()}))
        os.kill(os.getpid() if self.whom == "self" else os.getppid(), getattr(signal, self.name))


def train_signalled(argv: list[str], rank: int = 0, place: str = "", number: int = 0, name: str = "SIGTERM") -> str:
    """A run in this process group, to which a signal comes on one rank; how it has ended."""
    from zero_recipes.core import findings, process

    with Moments(number if process.rank() == rank else 0, name, place=place):
        try:
            run_sft.train(run_sft.prepare(argv))
            return "done"
        except findings.Preempted as ending:
            return str(ending)


original = run_sft.train


def train(run):
    rank, number, name, whom = os.environ["SIGNAL"].split(":")
    moments = Moments(int(number) if os.environ["RANK"] == rank else 0, name, whom).__enter__()
    trainer = original(run)
    if os.environ["RANK"] == "0":
        Path(os.environ["SENT"]).write_text(json.dumps({"calls": len(moments.calls)}))
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
