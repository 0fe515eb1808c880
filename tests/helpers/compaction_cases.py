"""A case of tests/helpers/group.py that counts what the LM head scores."""

from unittest import mock

from tests.helpers.cases import train


def train_counted(argv: list[str]) -> dict:
    """`train`, and of each micro batch the positions that the LM head scored, those with a loss, and all."""
    from trl.trainer import utils

    from zero_recipes.training.trainer import ZeroSFTTrainer

    scored, supervised, positions = [], [], []
    function, original = utils._ChunkedLogProbFunction, ZeroSFTTrainer.training_step

    class Counting:
        @staticmethod
        def apply(hidden, *arguments):
            scored.append(len(hidden))
            return function.apply(hidden, *arguments)

    def training_step(self, model, inputs, *rest, **keywords):
        labels = inputs["labels"][:, 1:]
        supervised.append(int((labels != -100).sum()))
        positions.append(labels.numel())
        return original(self, model, inputs, *rest, **keywords)

    with (
        mock.patch.object(utils, "_ChunkedLogProbFunction", Counting),
        mock.patch.object(ZeroSFTTrainer, "training_step", training_step),
    ):
        return train(argv) | {"scored": scored, "supervised": supervised, "positions": positions}
