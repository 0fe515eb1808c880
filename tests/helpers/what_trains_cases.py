"""Cases of tests/engine/test_what_trains.py: what a run says that trains, and at which rates it does."""

import run_sft
from tests.helpers.tools import before
from zero_recipes.model.trained import trained_parts
from zero_recipes.training.trainer import ZeroSFTTrainer


def rates(argv: list[str]) -> list[list[float]]:
    """Of each group of parameters, as each step begins."""
    found: list[list[float]] = []

    def look(self, *_, **__) -> None:
        found.append([group["lr"] for group in self.optimizer.param_groups])

    with before(ZeroSFTTrainer, "training_step", look):
        trainer = run_sft.train(run_sft.read_run(argv))
    trainer.accelerator.wait_for_everyone()
    return found


def said(argv: list[str]) -> str:
    trainer = run_sft.train(run_sft.read_run(argv))
    trainer.accelerator.wait_for_everyone()
    return trained_parts(trainer.model)
