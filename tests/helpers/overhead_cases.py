"""Cases of tests/helpers/group.py: what a training step of run_sft.py does beside the engine's own work."""

from unittest import mock

import run_sft
from zero_recipes.training import token_loss


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
