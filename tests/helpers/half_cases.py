"""Cases of tests/helpers/group.py for fp16 with loss scaling, which DeepSpeed refuses on most CPUs and these do not."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from unittest import mock

import torch
from transformers import TrainerCallback

from tests.helpers.around import before
from tests.helpers.cases import train
from tests.helpers.sample_cases import ending
from tests.helpers.unchecked import without_rules
from zero_recipes.libs.deepspeed import base_optimizer, flat_masters


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Torch computes in fp16 on any CPU, slowly; DeepSpeed asks for fast kernels, and so does our check."""
    from deepspeed.accelerator import get_accelerator

    supported = mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True)
    with supported, without_rules("fp16_on_cpu", "fp16_stage_0"):
        yield


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same values, NaN included: stage 3 pads the last rank's partition with memory that nobody has set."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class Watch(TrainerCallback):
    """After every step: the loss scale, whether it was skipped, the rate, and whether weights or states changed."""

    def __init__(self):
        self.steps: list[dict] = []
        self.last: list[torch.Tensor] = []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.last = self.values(model, optimizer)

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        now = self.values(model, optimizer)
        same = len(now) == len(self.last) and all(map(alike, now, self.last))
        self.last = now
        inner = optimizer.optimizer
        scale = inner.loss_scale_config.cur_scale if hasattr(inner, "loss_scale_config") else inner.loss_scale
        rate = lr_scheduler.get_last_lr()[0]
        self.steps.append({"scale": float(scale), "skipped": bool(inner.overflow), "same": same, "rate": rate})

    @staticmethod
    def values(model, optimizer) -> list[torch.Tensor]:
        inner = optimizer.optimizer
        masters = [*chain(*getattr(inner, "fp32_groups", ()))] or flat_masters(inner)  # stage 0 has them by tensor
        states = [torch.as_tensor(v) for state in base_optimizer(optimizer).state.values() for v in state.values()]
        return [v.detach().clone() for v in (*model.parameters(), *masters, *states)]


def train_in_fp16(argv: list[str]) -> dict:
    """`train` in fp16, with what `Watch` saw of each step."""
    from zero_recipes.training.trainer import ZeroSFTTrainer

    watch = Watch()
    with fp16_on_cpu(), before(ZeroSFTTrainer, "train", lambda self, *_: self.add_callback(watch)):
        return train(argv) | {"steps": watch.steps}


def ending_in_fp16(argv: list[str]) -> dict:
    """`ending` in fp16."""
    with fp16_on_cpu():
        return ending(argv)
