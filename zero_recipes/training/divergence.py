"""A loss or gradient norm that is not finite: printed at once, and the end of the run where it stays so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from zero_recipes.checkpoint.resume import numbered
from zero_recipes.checkpoint.save import checkpoint_fault
from zero_recipes.core.findings import RunFailed
from zero_recipes.libs.deepspeed import is_partitioned
from zero_recipes.libs.fsdp import local
from zero_recipes.metrics.callback import StageMetricsCallback


class Diverged(RunFailed):
    """The weights are lost: no model is saved, and the checkpoints before it are as they were."""

    status = "diverged"


class StopAtDivergence(TrainerCallback):
    """Ends a run after `limit` steps in a row whose loss or gradient norm is NaN or infinite.

    All ranks together: `metrics` has brought their figures together. In fp16 a gradient norm alone is no such step:
    the loss scale was too high, the step is skipped and the scale halved (torch GradScaler, DeepSpeed's
    DynamicLossScaler, which ends a run itself whose scale is at its minimum).
    """

    def __init__(self, metrics: StageMetricsCallback, limit: int):
        self.metrics, self.limit = metrics, limit
        self.in_a_row = 0
        self.overflows = False  # at the smallest loss scale of fp16
        self.first: tuple[int, str] | None = None  # the step at which the row began, and what was wrong
        self.printed: set[str] = set()

    @property
    def scales(self) -> bool:
        """Whether a loss scale makes gradients overflow now and then."""
        return self.metrics.identity.precision == "fp16"

    def on_step_end(self, args, state, control, **kwargs):
        loss, norm = self.metrics.last_step
        found = [("loss", loss)] if self.scales else [("loss", loss), ("gradient norm", norm)]
        wrong = [(what, value) for what, value in found if not math.isfinite(value)]
        self.in_a_row = self.in_a_row + 1 if wrong else 0
        if not wrong:
            return
        if self.in_a_row == 1:
            self.first = state.global_step, " and ".join(f"the {what} is {value}" for what, value in wrong)
        for what, value in wrong:
            if what not in self.printed and args.process_index == 0:
                print(
                    f"step {state.global_step}: the {what} is {value}. The run ends after {self.limit} such steps in a "
                    "row (stop_after_nonfinite_steps)",
                    flush=True,
                )
            self.printed.add(what)
        if self.in_a_row >= self.limit:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        if self.metrics.skipped and args.process_index == 0:
            print(
                f"{self.metrics.skipped} of {self.metrics.done} steps were skipped: fp16's loss scale was too high "
                "for them. Nothing was learned in them",
                flush=True,
            )

    def has_nonfinite_weights(self, trainer: SFTTrainer) -> bool:
        """Whether the weights of this moment are not worth keeping. Collective."""
        if self.in_a_row:
            return True
        # what is partitioned has unused bytes at its end; there the gradient norm tells, which stage 3 always has
        whole = [local(p) for p in trainer.model.parameters() if p.requires_grad and not is_partitioned(p)]
        bad = torch.stack([~torch.isfinite(p).all() for p in whole]).any() if whole else torch.tensor(False)
        return bool(trainer.accelerator.reduce(bad.to(trainer.accelerator.device, torch.float32)).item())

    @contextmanager
    def at_the_smallest_scale(self, trainer: SFTTrainer) -> Iterator[None]:
        """Training in fp16: raises Diverged where DeepSpeed ends it, whose loss scale cannot go lower.

        On every rank, since all see the same overflow (DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py, `update_scale`).
        """
        try:
            yield
        except Exception as error:
            if not (self.scales and "loss scale already at minimum" in str(error)):
                raise
            self.overflows = True
            raise Diverged(self._message(Path(trainer.args.output_dir), trainer.state.global_step + 1)) from error

    def raise_if_diverged(self, trainer: SFTTrainer) -> None:
        """Raises Diverged, on all ranks, for a run that was ended here or whose weights are not finite. Collective."""
        ended = self.in_a_row and (self.in_a_row >= self.limit or not self.scales)
        if ended or (not self.in_a_row and self.has_nonfinite_weights(trainer)):
            raise Diverged(self._message(Path(trainer.args.output_dir), trainer.state.global_step))

    def _message(self, output_dir: Path, step: int) -> str:
        what = f"the weights are not finite after step {step}"
        if self.overflows:
            what = f"the gradients of step {step} overflow fp16 at the smallest loss scale"
        if self.in_a_row:
            began, wrong = self.first
            what = f"{wrong} at step {began}, and not finite for {self.in_a_row} step{'s'[: self.in_a_row > 1]}"
        whole = [path for path in numbered(output_dir) if checkpoint_fault(path) is None]
        kept = f" {whole[-1]}, from before it, is kept." if whole else " No checkpoint was written before it."
        return (
            f"the training has diverged: {what}. No model is saved.{kept} Lower learning_rate or max_grad_norm, warm "
            "up for longer, train in bf16 instead of fp16, and look at the rows of those steps."
        )
