"""Cases of tests/helpers/group.py: what a step of run_sft.py computes and logs, and that of docs/bare_loop.py."""

import importlib.util
from unittest import mock

import run_sft
from tests.helpers.around import before
from tests.helpers.cases import train
from tests.helpers.tiny import ROOT
from zero_recipes.training import token_loss


def train_scored(argv: list[str]) -> dict:
    """`train`, and of each micro batch the positions that the LM head scored, those with a loss, and all."""
    from trl.trainer import utils

    from zero_recipes.training.trainer import ZeroSFTTrainer

    scored, supervised, positions = [], [], []
    function = utils._ChunkedLogProbFunction

    class Counting:
        @staticmethod
        def apply(hidden, *arguments):
            scored.append(len(hidden))
            return function.apply(hidden, *arguments)

    def count(self, model, inputs, *_) -> None:
        labels = inputs["labels"][:, 1:]
        supervised.append(int((labels != -100).sum()))
        positions.append(labels.numel())

    counting = mock.patch.object(utils, "_ChunkedLogProbFunction", Counting)
    with counting, before(ZeroSFTTrainer, "training_step", count):
        return train(argv) | {"scored": scored, "supervised": supervised, "positions": positions}


def log_of(argv: list[str], most_kept: int | None = None) -> dict:
    """The log of a run, and the losses and gradient norms of its steps. `most_kept`: micro batches until a gather."""
    with mock.patch.object(token_loss, "MOST_KEPT", most_kept or token_loss.MOST_KEPT):
        trainer = run_sft.train(run_sft.prepare(argv))
    trainer.accelerator.wait_for_everyone()
    return {
        "log": [entry for entry in trainer.state.log_history if "train_runtime" not in entry],
        "losses": trainer.stage_metrics.step_losses,
        "norms": trainer.stage_metrics.grad_norms,
        "flos": trainer.state.total_flos,
    }


def bare_loop(stage: int, steps: int, bf16: bool) -> list[float]:
    """Its losses, trained by the file itself."""
    spec = importlib.util.spec_from_file_location("bare_loop", ROOT / "docs" / "bare_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(stage, steps, bf16)
