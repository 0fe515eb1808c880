"""SIGTERM, SIGUSR1 and Ctrl-C: what they cut short, and what is then left for the run that goes on."""

import torch

from zero_recipes.core.process import remember_signals, signalled
from zero_recipes.engine.group import gather_rows


class CutShort(Exception):
    """A signal has come to a rank; all leave an evaluation, or the sample prompts, after the same batch."""


class Signals:
    """The signals that come to one training. They count from `listen` on.

    `obeyed`: whether they save a checkpoint and end the run; else they end the process as ever.
    """

    def __init__(self, obeyed: bool = False):
        self.obeyed = obeyed
        self.are_heard = False
        self.evaluation_due = False  # one was cut short: the run that goes on evaluates first

    def listen(self) -> None:
        """Begin to listen: from now on a signal does not end this process, if signals are obeyed."""
        self.are_heard = self.obeyed
        if self.are_heard:
            remember_signals(True)

    def raise_if_any(self, device: torch.device) -> None:
        """Raise CutShort on all ranks where a signal has come to one. Collective."""
        own = torch.tensor([[float(signalled())]], device=device)
        if gather_rows(own).any():
            raise CutShort
