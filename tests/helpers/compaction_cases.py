"""Cases of tests/helpers/group.py for the path that TRL's loss takes on GPUs: it scores supervised tokens alone."""

from __future__ import annotations

from unittest import mock

from tests.helpers.cases import train


def train_compacted(argv: list[str], compacted: bool, masked: list[list[int]]) -> dict:
    """`train` with TRL's CUDA path or without it. `masked`: [micro batch from 0, rank] without a supervised token.

    TRL 1.16, trainer/utils.py (`add_fused_lm_head`) compacts where Triton runs; its kernels stand in torch beside
    them (kernels/chunked_logprob.py, `_forward_tile`), which CPUs take in both paths.
    """
    from trl.trainer import utils

    from zero_recipes.training.trainer import ZeroSFTTrainer

    original, calls, asked = ZeroSFTTrainer.training_step, iter(range(10**6)), []

    def training_step(self, model, inputs, *arguments, **keywords):
        if [next(calls), self.args.process_index] in masked:
            inputs["labels"] = inputs["labels"].clone().fill_(-100)
        return original(self, model, inputs, *arguments, **keywords)

    def use_triton(device):
        asked.append(device.type)
        return compacted

    with (
        mock.patch.object(utils, "_use_triton", use_triton),
        mock.patch.object(ZeroSFTTrainer, "training_step", training_step),
    ):
        return train(argv) | {"asked": len(asked)}


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
