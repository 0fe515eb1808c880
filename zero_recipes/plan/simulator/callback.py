"""Watches a simulated run: names its phases to the tracker, and reads what metrics.json of a real run would hold."""

from __future__ import annotations

import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from zero_recipes.libs.deepspeed import base_optimizer, gradient_tensors, optimizer_tensors, weight_tensors
from zero_recipes.metrics.communication import CommunicationCounter
from zero_recipes.metrics.probe import StateProbe
from zero_recipes.model import parameter_counts
from zero_recipes.plan.simulator import autocast
from zero_recipes.plan.simulator.tracker import LiveStorages, Observed
from zero_recipes.training.token_loss import TokenWeights

TRAINING = ("forward", "backward", "step", "between")
AFTERWARDS = ("evaluation", "best model")  # what a run does beside its steps


class WatchedSFTTrainer(SFTTrainer):
    """SFTTrainer with a real run's token weights, which says when forward ends and backward begins."""

    watch: Watch

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.token_weights = TokenWeights(self)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self.token_weights.of_step(batches, count, device, self._get_num_items_in_batch)

    def prediction_step(self, model, inputs, *arguments, **keywords):
        return self.token_weights.predict(super().prediction_step, model, inputs, *arguments, **keywords)

    def compute_loss(self, model, inputs, *arguments, **keywords):
        if not self.model.training:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        self.watch.tracker.enter("forward")
        loss = super().compute_loss(model, inputs, *arguments, **keywords)
        autocast.forget_copies()
        self.watch.tracker.enter("backward")
        return loss

    def training_step(self, *arguments, **keywords):
        loss = super().training_step(*arguments, **keywords)
        self.watch.tracker.enter("between")
        self.watch.end_micro_step()
        return loss


class Watch(TrainerCallback):
    """Two steps: the first builds Adam's states, the second is read. Peaks are of both."""

    def __init__(self, strategy, observed: Observed, tracker: LiveStorages, host: LiveStorages, accumulation: int):
        """`accumulation`: micro steps of a step in the recipe; at most two are simulated, others are as the first."""
        self.accumulation, self.simulated = accumulation, min(accumulation, 2)
        self.strategy, self.observed = strategy, observed
        self.tracker, self.host = tracker, host
        self.trainer: WatchedSFTTrainer | None = None
        self.probe: StateProbe | None = None
        self.bytes: dict[str, int] = {}  # allocated after each phase: what StateProbe records
        self.states: dict[str, int] = {}
        self.done = 0
        self.host_load = 0

    def join(self, trainer: WatchedSFTTrainer) -> None:
        self.trainer, trainer.watch = trainer, self
        self.parameters, self.trainable = parameter_counts(trainer.model)
        self.record("model_loaded")
        for p in trainer.model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._own_gradient)

    def record(self, name: str) -> None:
        """Allocated bytes after a phase (in place of memory_probe.MemoryPhases)."""
        self.bytes[name] = self.tracker.live

    def _own_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.assign([parameter.grad], "grads")

    def on_train_begin(self, args, state, control, **kwargs):
        self.record("engine_built")
        self.host_load = max(self.host.peaks.values(), default=0)
        self.host.forget_peaks()
        self.probe = StateProbe(self.trainer.model, self.trainer.optimizer, self.strategy, self)
        self._assign()
        self._name_the_step()
        self.communication = CommunicationCounter(self.trainer.model_wrapped, self.strategy)
        self.communication.start()
        self.tracker.enter("between")
        self.tracker.forget_peaks()

    def _name_the_step(self) -> None:
        """accelerate's `backward` calls the engine's `step`; without DeepSpeed the Trainer calls the optimizer's."""
        owner = self.trainer.model_wrapped if self.strategy.is_deepspeed else self.trainer.optimizer
        step = owner.step

        def named(*arguments, **keywords):
            self.tracker.enter("step")
            return step(*arguments, **keywords)

        owner.step = named

    def end_micro_step(self) -> None:
        """What this micro step sent: those of a step differ, for only the last one steps."""
        self.communication.end_step()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.done == 1:
            self.probe.attach()
            self.observed.counts_flops = True

    def on_step_end(self, args, state, control, **kwargs):
        self.tracker.enter("between")
        if self.probe.attached:
            self.states = self.probe.detach()
        self.done += 1
        self._assign()

    def _assign(self) -> None:
        parameters, optimizer = self.probe.parameters, self.probe.states_of
        for tracker in (self.tracker, self.host):
            tracker.assign(getattr(self.trainer.model_wrapped, "buckets", []), "buckets")  # of DistributedDataParallel
            tracker.assign(list(gradient_tensors(parameters, optimizer)), "grads")
            tracker.assign(list(optimizer_tensors(parameters, optimizer)), "optimizer")
            tracker.assign(list(weight_tensors(parameters, optimizer)), "params")

    def evaluate(self, rows) -> None:
        """One batch of an evaluation, as the Trainer's loop takes it."""
        trainer, self.observed.counts_flops = self.trainer, False
        trainer.token_weights.begin_evaluation()
        batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader(rows))))
        self.tracker.enter("evaluation")
        trainer.model_wrapped.eval()
        trainer.prediction_step(trainer.model_wrapped, batch, prediction_loss_only=True)
        autocast.forget_copies()
        trainer.model_wrapped.train()
        self.tracker.enter("between")

    def load_best_model(self) -> None:
        """What load_best_model_at_end loads beside what is there: the optimizer's states once more.

        transformers 5.23, integrations/deepspeed.py `deepspeed_load_checkpoint` asks for them too; DeepSpeed 0.19.8
        reads its file to the host, and torch's Optimizer.load_state_dict makes all the new states before it drops the
        old ones (deepspeedai/DeepSpeed#3938).
        """
        states = base_optimizer(self.trainer.optimizer).state.values()
        self.tracker.enter("best model")
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        again = [tensor.clone() for tensor in tensors]
        del again
        self.tracker.enter("between")

    def found(self) -> dict:
        """What this rank needs; metrics/prediction.py says what the keys mean."""
        peaks = {phase: self.tracker.peaks.get(phase, 0) for phase in TRAINING}
        peaks |= {phase: self.tracker.peaks[phase] for phase in AFTERWARDS if phase in self.tracker.peaks}
        phase = max(peaks, key=peaks.get)
        return {
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "allocated_peak_bytes": peaks[phase],
            "peak_phase": phase,
            "peak_operator": self.tracker.operators[phase],
            "at_peak": self.tracker.at_peak[phase],
            "peaks": peaks,
            "model_state_bytes": self.states,
            "memory_phases": self.bytes,
            "host_load": self.host_load,
            "host_training": max(self.host.peaks.values(), default=0),
            "communication_bytes_per_step": self._communication(),
            "flops_per_step": self.observed.flops // self.simulated * self.accumulation,
        }

    def _communication(self) -> dict[str, int]:
        """Of one step: the last micro step, and as many of the others as the recipe has."""
        micro_steps = [everywhere for everywhere, _ in self.communication.steps]
        last = micro_steps[-1]
        if not self.strategy.is_deepspeed:
            return last  # DistributedDataParallel reduces in the last micro step only
        other = micro_steps[-2] if self.simulated > 1 else {}
        return {
            name: last.get(name, 0) + (self.accumulation - 1) * other.get(name, 0) for name in sorted({*last, *other})
        }
