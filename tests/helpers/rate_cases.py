"""Case of tests/engine/test_rates.py: the learning rate of each group of parameters, step by step."""

import run_sft
from tests.helpers.tools import before
from zero_recipes.training.trainer import ZeroSFTTrainer


def rates(argv: list[str]) -> list[list[float]]:
    """As each step begins."""
    found: list[list[float]] = []

    def look(self, *_, **__) -> None:
        found.append([group["lr"] for group in self.optimizer.param_groups])

    with before(ZeroSFTTrainer, "training_step", look):
        trainer = run_sft.train(run_sft.read_run(argv))
    trainer.accelerator.wait_for_everyone()
    return found
