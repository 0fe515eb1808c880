"""Cases of tests/helpers/group.py: what a training step of run_sft.py does beside the engine's own work."""

from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, TrainerCallback

import run_sft
from zero_recipes.training import token_loss
from zero_recipes.training.trainer import ZeroSFTTrainer


class CountHostWork(TorchDispatchMode):
    """Counts collectives, numbers that are read back from a device, and walks through all parameters."""

    def __init__(self):
        super().__init__()
        self.counted: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("c10d::"):
            self.counted[func.name().removeprefix("c10d::")] += 1
        elif func.name() == "aten::_local_scalar_dense":
            self.counted["read"] += 1
        return func(*args, **(kwargs or {}))

    def counting(self, method, name: str):
        def counted(*arguments, **keywords):
            self.counted[name] += 1
            return method(*arguments, **keywords)

        return counted


class Snapshots(TrainerCallback):
    """What was counted in each step: from the end of one to the end of the next, so a log is the next step's."""

    def __init__(self, mode: CountHostWork):
        self.mode, self.steps = mode, []

    def on_step_end(self, *arguments, **keywords):
        self.steps.append(dict(self.mode.counted))
        self.mode.counted.clear()


def host_work(argv: list[str]) -> list[dict[str, int]]:
    """{operator: calls} of each optimizer step of one run."""
    mode = CountHostWork()
    snapshots = Snapshots(mode)
    train = ZeroSFTTrainer.train

    def counted(self, *arguments):
        self.add_callback(snapshots)
        with mode:
            return train(self, *arguments)

    tolist, walk = torch.Tensor.tolist, PreTrainedModel.num_parameters
    with (
        mock.patch.object(ZeroSFTTrainer, "train", counted),
        mock.patch.object(torch.Tensor, "tolist", mode.counting(tolist, "read")),
        mock.patch.object(PreTrainedModel, "num_parameters", mode.counting(walk, "num_parameters")),
    ):
        run_sft.train(run_sft.prepare(argv)).accelerator.wait_for_everyone()
    return snapshots.steps


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
