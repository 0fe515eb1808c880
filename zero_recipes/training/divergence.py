"""What ends a run before its last step: figures that are not finite, and evaluations without progress."""

import math

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import EarlyStoppingCallback, TrainerCallback

from zero_recipes.core.process import say
from zero_recipes.core.run_end import RunFailed
from zero_recipes.engine.deepspeed import is_partitioned
from zero_recipes.engine.fsdp import local
from zero_recipes.metrics.callback import StageMetricsCallback


class Diverged(RunFailed):
    """Training has diverged: no model is saved, and the checkpoints before it are as they were."""

    status = "diverged"

    def __init__(self, what: str):
        super().__init__(
            f"training diverged: {what}. No model is saved; earlier checkpoints are kept. Lower learning_rate or "
            "max_grad_norm, use a longer warmup, train in bf16 instead of fp16, and check the rows of these steps."
        )


class StopAtDivergence(TrainerCallback):
    """Ends a run after `limit` steps in a row whose loss or gradient norm is NaN or infinite. All ranks together:
    `metrics` has brought their figures together. In fp16 a gradient norm alone is no such step: the loss scale was too
    high, the step is skipped and the scale halved."""

    def __init__(self, metrics: StageMetricsCallback, limit: int):
        self.metrics, self.limit = metrics, limit
        self.in_a_row = 0
        self.first = ""  # what was wrong at the first step of the row

    def on_step_end(self, args, state, control, **kwargs):
        wrong = not_finite(self.metrics)
        if not wrong:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row == 1:
            self.first = f"{' and '.join(wrong)} at step {state.global_step}"
            say(f"{self.first}. The run ends after {self.limit} such steps in a row (stop_after_nonfinite_steps)")
        if self.in_a_row >= self.limit:
            control.should_training_stop = True
            control.should_save = False
            control.should_evaluate = False

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.in_a_row or has_nonfinite_weights(model):
            raise Diverged(self.first or f"the weights are not finite after step {state.global_step}")


class StopWithoutProgress(EarlyStoppingCallback):
    """transformers' early stopping, whose count goes on in a resumed run under this run's patience.

    transformers 5.23 restores neither or both (trainer.py `_load_callback_state`), and saves no checkpoint where the
    one before it had no such count (`_save_checkpoint`, a KeyError).
    """

    def __init__(self, metrics: StageMetricsCallback, patience: int, threshold: float):
        super().__init__(patience, threshold)
        self.metrics = metrics

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        carried = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = carried["attributes"]["early_stopping_patience_counter"]
        self._stop_if_due(state, control)  # an earlier run was killed before its end

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        super().on_evaluate(args, state, control, metrics, **kwargs)
        self._stop_if_due(state, control)

    def _stop_if_due(self, state, control) -> None:
        if self.early_stopping_patience_counter < self.early_stopping_patience:
            return
        control.should_training_stop = True
        if state.global_step < state.max_steps:
            self.metrics.stopped_early_at = state.global_step
            count = self.early_stopping_patience_counter
            say(f"stopped early at step {state.global_step}: {count} evaluations in a row did not improve")


def not_finite(metrics: StageMetricsCallback) -> list[str]:
    """What was NaN or infinite in the last step, in words with the value. In fp16 a gradient norm may be."""
    loss, norm = metrics.last_step
    wrong = []
    if not math.isfinite(loss):
        wrong.append(f"the loss is {loss}")
    if metrics.identity.precision != "fp16" and not math.isfinite(norm):
        wrong.append(f"the gradient norm is {norm}")
    return wrong


def has_nonfinite_weights(model: torch.nn.Module) -> bool:
    """Whether a weight on any rank is NaN or infinite. Collective. What is partitioned has unused bytes at its end;
    there the gradient norm shows it, which stage 3 always has."""
    device = PartialState().device
    bad = torch.zeros((), device=device)  # read once: each reading would wait for the GPU
    for p in model.parameters():
        if p.requires_grad and not is_partitioned(p):
            bad += (~torch.isfinite(local(p)).all()).to(bad)
    return bool(reduce(bad).item())
