"""Cases of tests/helpers/group.py: what a step computes and logs, docs/bare_loop.py, fp16, faults of libraries."""

import contextlib
import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from unittest import mock

import deepspeed
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from transformers import AttentionInterface, TrainerCallback

import run_sft
from tests.helpers.cases import train
from tests.helpers.ending_cases import ending
from tests.helpers.tiny import ROOT
from tests.helpers.tools import before, without_rules
from zero_recipes.engine import attention
from zero_recipes.engine.deepspeed import base_optimizer, flat_masters
from zero_recipes.engine.faults.stage_0_first_step import fresh_adam_at_stage_0
from zero_recipes.engine.speed.cpu_products import multiply_in_fp32
from zero_recipes.training import token_loss
from zero_recipes.training.trainer import ZeroSFTTrainer


def train_scored(argv: list[str]) -> dict:
    """`train`, and of each micro batch the positions that the LM head scored, those with a loss, and all."""
    from trl.trainer import utils

    scored, supervised, positions = [], [], []
    function = utils._ChunkedLogProbFunction

    class Counting:
        @staticmethod
        def apply(hidden, *arguments):
            if positions:  # of the run, not of the look at a small model before it
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
        trainer = run_sft.train(run_sft.read_run(argv))
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
    if bf16:
        multiply_in_fp32()  # as a run does: the order of sums is then the same
    return module.train(stage, steps, bf16)


# fp16 with loss scaling, which DeepSpeed refuses on most CPUs and these do not


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Torch computes in fp16 on any CPU, slowly; DeepSpeed asks for fast kernels, and so does our check."""
    from deepspeed.accelerator import get_accelerator

    supported = mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True)
    with supported, without_rules("ZR373", "ZR2021"):
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
    watch = Watch()
    with fp16_on_cpu(), before(ZeroSFTTrainer, "train", lambda self, *_: self.add_callback(watch)):
        return train(argv) | {"steps": watch.steps}


def ending_in_fp16(argv: list[str]) -> dict:
    """`ending` in fp16."""
    with fp16_on_cpu():
        return ending(argv)


# faults of libraries: tests/engine/test_library_faults.py


def timeouts(argv: list[str], patched: bool) -> list[float]:
    """Seconds of the process groups that a run makes."""
    from deepspeed.utils import groups

    known = set(distributed_c10d._world.pg_map)
    groups._WORLD_GROUP = None  # DeepSpeed 0.19.8, utils/groups.py: made once for a process
    train(argv, None if patched else "zero_recipes.engine.faults.group_timeouts.apply")
    groups._WORLD_GROUP = None
    made = set(distributed_c10d._world.pg_map) - known
    backends = [group._get_backend(torch.device("cpu")) for group in made]
    return [backend.options._timeout.total_seconds() for backend in backends]


def train_with_a_slow_writer(argv: list[str]) -> None:
    """`train`, where rank 0 writes the model for longer than a collective may take."""
    limit, usual = timedelta(seconds=2), timedelta(minutes=10)  # a rank of a busy machine may be late by a second
    save_model = ZeroSFTTrainer.save_model

    def quickly_ending(self, *arguments, **keywords):
        for time, act in ((limit, save_model), (usual, lambda *_, **__: None)):
            distributed.barrier()
            distributed_c10d._set_pg_timeout(time, distributed.group.WORLD)
            act(self, *arguments, **keywords)

    def wait(*_, **__) -> None:
        for _ in range(2 if distributed.get_rank() == 0 else 0):  # as long as two collectives that nobody answers
            with contextlib.suppress(RuntimeError):
                distributed_c10d._get_default_store().wait(["step_cases/never"], limit)

    with mock.patch.object(ZeroSFTTrainer, "save_model", quickly_ending), before(ZeroSFTTrainer, "_save", wait):
        train(argv)


def sent_a_step(argv: list[str], patched: bool) -> dict[str, int]:
    """Bytes of one optimizer step by collective. Unpatched: stage 3 keeps its answers when the trace is dropped."""
    left_out = None if patched else "zero_recipes.engine.faults.stale_releases.apply"
    return train(argv, left_out)["metrics"]["communication_bytes_per_step"]


def fresh_adam() -> dict:
    """Adam's step counter and whether the fp32 masters are the weights, though weight decay has shrunk them in
    DeepSpeed's step before training: as DeepSpeed leaves it, and as `fresh_adam_at_stage_0` does."""
    left = {}
    for name in ("unpatched", "fresh"):
        layer = torch.nn.Linear(3, 3)
        _, optimizer, _, _ = deepspeed.initialize(
            model=layer,
            optimizer=torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5),
            config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        )
        if name == "fresh":
            fresh_adam_at_stage_0(optimizer)
        groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        same = [torch.equal(m, w.float()) for masters, weights in groups for m, w in zip(masters, weights, strict=True)]
        steps = max(float(tensors["step"]) for tensors in optimizer.state.values())
        left[name] = {"steps": steps, "masters_are_the_weights": all(same)}
    return left


def train_and_see_attention(argv: list[str]) -> dict:
    """`train`, and whether sdpa took packs apart."""
    return train(argv) | {"by_row": AttentionInterface()["sdpa"] is attention._by_row}
