"""What a strategy cost: memory, model states, tokens per second, communication and loss of one run, in metrics.json.

Everything is read off the engine's own tensors and collectives; nothing here knows the formulas that it is compared
with. The contract of the file stands in docs/metrics.md.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from zero_recipes.config.run import RunConfig
from zero_recipes.core import environment
from zero_recipes.core.phases import PhaseClock
from zero_recipes.core.process import rank
from zero_recipes.distributed import nvme
from zero_recipes.distributed.agree import gather_rows
from zero_recipes.libs import deepspeed_tensors
from zero_recipes.metrics.communication import CommunicationCounter
from zero_recipes.metrics.gradient_dtypes import gradient_dtypes
from zero_recipes.metrics.identity import identity
from zero_recipes.metrics.memory_probe import MemoryPhases, StateProbe
from zero_recipes.metrics.model_flops import UsedFlops
from zero_recipes.metrics.parts import (
    Disk,
    DiskTraffic,
    Evaluation,
    Failure,
    GradientDtypes,
    Hardware,
    HostLink,
    ModelStateBytes,
    Network,
    Nvme,
    PeakMemory,
    PhaseBytes,
    PhaseSeconds,
    SecondsInStep,
)
from zero_recipes.metrics.prediction import PredictedMetrics
from zero_recipes.metrics.schema import FILE, SCHEMA, Measurements, Metrics, Status, first_nonfinite
from zero_recipes.metrics.summary import History, RankFigures, continued, summarise, tokens_of
from zero_recipes.metrics.timers import EngineSeconds, StepClock, steps_not_timed
from zero_recipes.model import parameter_counts


class StageMetricsCallback(TrainerCallback):
    """Collects the metrics of one training run; `write` puts them into output_dir/metrics.json on rank 0."""

    def __init__(
        self,
        run: RunConfig,
        training_args,
        model: torch.nn.Module,
        clock: PhaseClock,
        *,
        disks: list,  # zero_recipes/distributed/nvme.py, swap_space
        link: dict[str, Any] | None = None,  # zero_recipes/distributed/bandwidth.py
        links: dict[str, Any] | None = None,  # zero_recipes/distributed/bandwidth.py; None on one machine
        predicted: PredictedMetrics | None = None,
    ):
        self.strategy, self.device, self.clock, self.predicted = run.strategy, run.device, clock, predicted
        self.disks, self.traffic = [Disk(**disk) for disk in disks], nvme.Traffic()
        self.link = None if link is None else HostLink(**link)
        self.network = None if links is None else Network(**links)
        self.identity = identity(run, training_args, model)
        self.used = UsedFlops(self.identity)
        self.trainer: Any = None  # trainer.trainer.RecipeTrainer
        self.phases = MemoryPhases(run.device)
        self.phases.record("model_loaded")
        self.steps = StepClock(run.device)
        self.losses: list[torch.Tensor] = []  # one scalar per optimizer step, of this rank
        self.step_losses: list[float] = []  # the same of all ranks, as soon as the step is over
        self.last_step = (0.0, 0.0)  # loss of all ranks and the worst rank's gradient norm, 0 where there is none
        self.grad_norms: list[float] = []
        self.skipped = 0  # steps, by the loss scale of fp16
        self.evaluations: list[Evaluation] = []
        self.norm: torch.Tensor | None = None  # of the step at work, not read back yet
        self.tokens: torch.Tensor | None = None  # all, non-padding, supervised, squares; of this rank and run
        self.tokens_timed: torch.Tensor | None = None  # the same over the timed steps
        self.states = dict.fromkeys((*deepspeed_tensors.STATE_PARTS, "offloaded_host", "offloaded_disk"), 0)
        self.probe: StateProbe | None = None
        self.communication: CommunicationCounter | None = None
        self.engine_seconds: EngineSeconds | None = None
        self.gradient_dtypes: GradientDtypes | None = None
        self.warmup = 0
        self.probed = 0  # steps before the one that the probe looks into
        self.done = 0
        self.summary = Measurements(loss_history=[])
        self.earlier = Measurements()  # of the run that wrote the checkpoint
        self.first_step = 1  # of loss_history
        self.resumed_at: list[int] = []

    def take_up(self, carried: dict[str, Any], step: int) -> None:
        """Go on from what the checkpoint of `step` carries; `carried` is empty where another program wrote it."""
        history = History.model_validate(carried)
        self.resumed_at = [*history.resumed_at, step]
        self.first_step = step + 1 if history.first_step is None else history.first_step
        self.earlier = history.summary
        self.grad_norms += history.grad_norm_history
        self.evaluations += history.eval_history

    def history(self) -> dict[str, Any]:
        """What a checkpoint carries, for `take_up`, as JSON can hold it. Every rank calls it (collectives)."""
        history = History(
            summary=self._summary(),
            grad_norm_history=self.grad_norms,
            eval_history=self.evaluations,
            first_step=self.first_step,
            resumed_at=self.resumed_at,
        )
        return history.model_dump(mode="json")

    def watch(self, trainer) -> None:
        """Join callback and trainer; TRL has put LoRA's adapter around the model by now, so count it again."""
        self.trainer, trainer.stage_metrics = trainer, self
        parameters, trainable = parameter_counts(trainer.model)
        counted = {"parameters": parameters, "trainable_parameters": trainable}
        self.identity = self.identity.model_copy(update=counted)
        self.used.count(trainer.model)

    # called by RecipeTrainer

    def count_tokens(self, inputs: dict[str, torch.Tensor], repeated: torch.Tensor | None = None) -> None:
        """Add one micro batch: input_ids and labels of shape (batch, length), attention_mask likewise or absent;
        `repeated`: likewise, the tokens of rows that the epoch had before. Those are counted once.

        The sums stay on the device until the run ends: reading one would wait for the GPU in every micro batch."""
        counted = self.used.counted(inputs, repeated)
        self.tokens = counted if self.tokens is None else self.tokens + counted
        if self.done >= self.warmup:
            self.tokens_timed = counted if self.tokens_timed is None else self.tokens_timed + counted

    def since_last_log(self) -> dict[str, float]:
        """For the progress line, of all ranks. Every rank calls it (a collective)."""
        with self.communication.not_counted():
            return self.used.since_last_log(self.tokens, self.steps, self.trainer.accelerator)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add one micro batch's share of the step's loss (the Trainer has scaled it already)."""
        if len(self.losses) == self.done:
            self.losses.append(loss.float())
        else:
            self.losses[-1] = self.losses[-1] + loss.float()

    def add_norm(self, norm: torch.Tensor | float) -> None:
        """The gradient norm of the step at work, on whichever device: on a GPU it is read with the loss."""
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's is a DTensor
        self.norm = torch.as_tensor(whole, dtype=torch.float64).detach().reshape(())

    # called by the Trainer

    def on_train_begin(self, args, state, control, **kwargs):
        total = state.max_steps - state.global_step
        self.warmup, self.probed = steps_not_timed(total), min(1, max(0, total - 1))
        self.phases.record("engine_built")
        if self.device == "cuda":  # earlier callbacks have generated samples, which use memory of their own
            torch.cuda.empty_cache()  # peaks begin again at what is reserved, and the allocator keeps what was freed
            torch.cuda.reset_peak_memory_stats()
        self.probe = StateProbe(self.trainer, self.strategy, self.phases)
        self.communication = CommunicationCounter(self.trainer.model_wrapped, self.strategy.world_size)
        self.engine_seconds = EngineSeconds(self.trainer.model_wrapped)
        self.gradient_dtypes = gradient_dtypes(self.trainer)
        if total:  # a resumed run may have no step left, and then nothing would stop it
            self.communication.start()
        if self.disks:
            self.traffic.start()
        self.steps.open()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.done == self.probed:  # the second one where there is one: Adam's states exist from it on
            self.probe.attach()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.close()
        if self.done < max(1, self.warmup):
            self.communication.end_step()
        self.done += 1
        self.skipped += bool(self.trainer.accelerator.optimizer_step_was_skipped)
        self._bring_losses_together()
        if self.probe.attached:
            self.states = self.probe.detach()
        if self.done == max(1, self.warmup):
            self.communication.stop()
        self.steps.open()

    def _bring_losses_together(self) -> None:
        """What must end a run then ends it on every rank, and a crash leaves the losses behind.

        The only numbers of a step that are read back from a GPU, together: all ranks have to know before the next."""
        loss, norm = self.losses[-1].double(), self.norm
        own = torch.stack([loss, loss.new_zeros(()) if norm is None else norm.to(loss)]).reshape(1, 2)
        with self.communication.not_counted():
            everyone = gather_rows(own).tolist()
        losses, norms = zip(*everyone, strict=True)
        self.step_losses.append(sum(losses) / len(losses))
        self.last_step = self.step_losses[-1], next((norm for norm in norms if not math.isfinite(norm)), norms[0])
        if norm is not None:
            self.grad_norms.append(norms[rank()])
        self.norm = None

    def on_log(self, args, state, control, **kwargs):
        self.steps.open()

    def on_save(self, args, state, control, **kwargs):
        self.steps.open()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics and "eval_loss" in metrics:
            self.evaluations.append(Evaluation(step=state.global_step, loss=metrics["eval_loss"]))
        self.steps.open()

    def end_steps(self) -> None:
        """Training has ended: the figures are complete. Every rank calls it (collectives)."""
        self.summary = self._summary()

    def _summary(self) -> Measurements:
        """Read peaks and bring all ranks' figures together, those of the run that was resumed included."""
        losses = torch.stack(self.losses).double() if self.losses else torch.zeros(0, dtype=torch.float64)
        own = RankFigures(
            peak=PeakMemory(**environment.peak_memory(self.device)),
            states=ModelStateBytes(**self.states),
            losses=losses.cpu().tolist(),
            tokens=tokens_of(self.tokens),
            timed_tokens=tokens_of(self.tokens_timed),
            timed_flops=self.used.of(self.tokens_timed),
            traffic=DiskTraffic(**self.traffic.per_step(self.done)) if self.disks else None,
        )
        ranks = gather_object([own])
        seconds = self.steps.seconds()
        if not seconds:  # a resumed run that had no step left
            peaks = Measurements(peak_memory_bytes=[rank.peak for rank in ranks], loss_history=[])
            return peaks if self.earlier == Measurements() else self.earlier
        within = self.engine_seconds.median(self.warmup)
        now = summarise(
            ranks,
            seconds,
            min(self.warmup, len(seconds)),
            self.used.peak,
            nvme=Nvme(disks=self.disks, bytes_per_step=[rank.traffic for rank in ranks]) if self.disks else None,
            engine_seconds=None if within is None else SecondsInStep(**within),
            communication_bytes_per_step=self.communication.median(),
            communication_bytes_between_nodes=self.communication.median_between_nodes(),
            skipped_steps=self.skipped if self.identity.precision == "fp16" else None,
        )
        return continued(self.earlier, now)

    def states_so_far(self) -> dict[str, int]:
        """Model-state bytes of this rank, for a run that fails: the largest seen, or those of this moment."""
        if self.probe is None or any(self.states.values()):
            return self.states
        return self.probe.read()

    def losses_so_far(self) -> list[float]:
        """Of the whole run, without a collective."""
        return [*(self.earlier.loss_history or []), *self.step_losses]

    def write(
        self, output_dir: Path, status: Status = "ok", error: str | None = None, failure: Failure | None = None
    ) -> None:
        """Write metrics.json on rank 0: complete after `end_steps`, before it with null for what was not measured."""
        if rank():
            return
        if not self.summary.loss_history:
            self.summary = self.summary.model_copy(update={"loss_history": self.losses_so_far()})
        self.clock.book()
        row = Metrics(
            schema=SCHEMA,
            status=status,
            error=error,
            **dict(self.identity),
            **dict(self.summary),
            memory_phases=PhaseBytes(**self.phases.bytes) if self.device == "cuda" else None,
            host_memory_phases=PhaseBytes(**self.phases.host_bytes),
            host_device_bytes_per_second=self.link,
            host_threads=torch.get_num_threads(),
            phase_seconds=PhaseSeconds(**{name: round(spent, 3) for name, spent in self.clock.seconds.items()}),
            first_step=self.first_step,
            resumed_at=self.resumed_at,
            gradient_dtypes=self.gradient_dtypes,
            grad_norm_history=self.grad_norms,
            first_nonfinite_step=first_nonfinite(self.summary.loss_history, self.first_step),
            eval_history=self.evaluations,
            network=self.network,
            predicted=self.predicted,
            versions=environment.versions(),
            hardware=Hardware(**environment.hardware(self.device)),
            **({} if failure is None else {"failure": failure}),
        )
        row.write(output_dir / FILE)
