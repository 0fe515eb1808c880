"""Measures one run on the engine's own tensors and collectives, and writes metrics.json (docs/metrics.md)."""

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import computed_in, precision_of
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.measured_on import hardware_facts, library_versions, peak_memory
from zero_recipes.core.process import PhaseClock, rank, signalled
from zero_recipes.engine.deepspeed import STATE_PARTS
from zero_recipes.engine.group import gather_rows
from zero_recipes.engine.quantized import share_not_quantized
from zero_recipes.metrics import probe, schema
from zero_recipes.metrics.communication import CommunicationCounter
from zero_recipes.model.trained import parameter_counts


def strategy_of(args) -> Strategy:
    """The strategy of a Trainer that no recipe describes, as accelerate's state has it.

    `args`: TrainingArguments, made before.
    """
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    if state.deepspeed_plugin is not None:
        ds_config = DsConfig(state.deepspeed_plugin.hf_ds_config.config)
        return Strategy(ds_config.name, args.world_size, ds_config, "accelerate's state")
    if getattr(state, "fsdp_plugin", None) is not None:
        return Strategy(f"fsdp{state.fsdp_plugin.fsdp_version}", args.world_size, fsdp_config={})
    return Strategy("ddp" if args.world_size > 1 else "single", args.world_size)


class StageMetricsCallback(TrainerCallback):
    """Measures a training run and writes metrics.json, which `zero-recipes report` reads (docs/metrics.md).

    Works in any Trainer: `Trainer(..., callbacks=[StageMetricsCallback("output")])`.
    Losses and gradient norms come from the log, and need logging_steps=1.
    ZeroSFTTrainer passes the exact numbers of every micro batch instead.
    Rank 0 writes the file: when training begins and ends, and after an evaluation behind it.

    Args:
        output_dir: The folder of metrics.json. Default: the Trainer's output_dir.
        strategy: How the run is sharded. Default: what accelerate's state says.
        predicted: What a plan says of the run. It is written beside what was measured.
        ends_with_training: Whether the file is complete when training ends. A recipe's run, which saves and samples
            behind it, passes False and calls `write` itself.
        **known: Fields of schema.RunIdentity, such as `name` or `model`, in place of what the Trainer knows of them.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        strategy: Strategy | None = None,
        predicted: schema.PredictedMetrics | None = None,
        ends_with_training: bool = True,
        **known: Any,
    ):
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.strategy = strategy
        self.predicted = predicted
        self.ends_with_training = ends_with_training
        self.known = known
        self.identity: schema.RunIdentity | None = None
        self.engine: torch.nn.Module | None = None  # what wraps the model: ZeroSFTTrainer sets it, no event carries it
        self.phases: dict[str, int] = {}  # bytes allocated after each phase of the first steps
        self.record("model_loaded")
        self.begin()

    def record(self, phase: str) -> None:
        """Note the bytes that are allocated on a GPU as a phase of the run ends."""
        if torch.cuda.is_available():
            self.phases[phase] = torch.cuda.memory_allocated()

    def begin(self) -> None:
        """Forget all measurements, for a first training or another one of the same Trainer."""
        self.finished = False
        self.clock = PhaseClock()
        self.steps = probe.StepClock("cpu")  # the device's, once training begins
        self.losses: list[torch.Tensor] = []  # one scalar per optimizer step, of this rank
        self.step_losses: list[float] = []  # the same of all ranks, as soon as the step is over
        self.logged_losses: dict[int, float] = {}  # by step, of a Trainer that does not hand its losses over
        self.signalled = False  # any rank, by the end of the last step
        self.last_step = (0.0, 0.0)  # loss of all ranks and the worst rank's gradient norm, 0 where there is none
        self.grad_norms: list[float] = []
        self.skipped = 0  # steps, by the loss scale of fp16
        self.evaluations: list[schema.Evaluation] = []
        self.norm: torch.Tensor | None = None  # of the step at work, not read back yet
        self.has_labels = False
        self.tokens: torch.Tensor | None = None  # all, non-padding, supervised, squares; of this rank and run
        self.tokens_timed: torch.Tensor | None = None  # the same over the timed steps
        self.states = dict.fromkeys((*STATE_PARTS, "offloaded_host", "offloaded_disk"), 0)
        self.forward_hook = None
        self.probe: probe.StateProbe | None = None
        self.communication: CommunicationCounter | None = None
        self.started_at = 0  # step
        self.warmup = 0
        self.probed = 0  # steps before the one that the probe looks into
        self.done = 0
        self.summary = schema.Measurements(loss_history=[])
        self.earlier = schema.Measurements()  # of the run that wrote the checkpoint
        self.first_step = 1  # of loss_history
        self.resumed_at: list[int] = []
        self.exact_master_weights: bool | None = None  # ZeroSFTTrainer knows it
        self.stopped_early_at: int | None = None  # step; StopWithoutProgress knows it
        self.best_step: int | None = None

    # called by ZeroSFTTrainer

    def load_state_dict(self, carried: dict[str, Any], step: int) -> None:
        """Take over the measurements that a checkpoint carries, so that metrics.json tells of the whole run.

        Args:
            carried: What `history` has returned. Empty where another program wrote the checkpoint.
            step: The checkpoint's optimizer step.
        """
        history = probe.History.model_validate(carried)
        self.resumed_at = [*history.resumed_at, step]
        self.first_step = step + 1 if history.first_step is None else history.first_step
        self.exact_master_weights = history.exact_master_weights
        self.earlier = history.summary
        self.grad_norms += history.grad_norm_history
        self.evaluations += history.eval_history

    def history(self) -> dict[str, Any]:
        """What a checkpoint carries of the measurements so far. Collective.

        Returns:
            A dict that JSON can hold, for `load_state_dict`.
        """
        return probe.History(
            summary=self._summary(),
            grad_norm_history=self.grad_norms,
            eval_history=self.evaluations,
            first_step=self.first_step,
            resumed_at=self.resumed_at,
            exact_master_weights=self.exact_master_weights,
        ).model_dump(mode="json")

    def count_tokens(self, inputs: dict[str, torch.Tensor], repeated: torch.Tensor | None = None) -> None:
        """Add the tokens of one micro batch.

        The sums stay on the device: reading one would wait for the GPU in every micro batch.

        Args:
            inputs: input_ids of shape (batch, length). Labels and attention_mask are of the same shape, or absent.
            repeated: Of the same shape, the tokens of rows that the epoch had before. Those are counted once.
        """
        counted = self.used.counted(inputs, repeated)
        self.has_labels = self.has_labels or "labels" in inputs or "shift_labels" in inputs
        self.tokens = counted if self.tokens is None else self.tokens + counted
        if self.done >= self.warmup:
            self.tokens_timed = counted if self.tokens_timed is None else self.tokens_timed + counted

    def since_last_log(self) -> dict[str, float]:
        """Speed, memory and communication of all ranks since the last call, for the log. Collective (one gather).

        Returns:
            {name: number}; in the first call with what the plan says, as "planned_...". Empty where no token counted.
        """
        if self.tokens is None:
            return {}
        plan = self.predicted
        is_first = not self.used.logged_steps
        peak = peak_memory(self.device)
        peak_bytes = self.tokens.new_tensor([peak["allocated"] or peak["rss"]])
        own = torch.cat([self.tokens - self.used.logged, peak_bytes])
        everyone = gather_rows(own.unsqueeze(0))
        logs = self.used.since_last_log(everyone[:, :-1].sum(0), self.steps, self.identity.world_size)
        self.used.logged = self.tokens
        logs["peak_memory_bytes"] = int(everyone[:, -1].max())
        logs["communication_bytes_per_step"] = sum(self.communication.median().values())
        if is_first and plan is not None:
            logs |= {f"planned_{name}": value for name, value in plan if isinstance(value, int)}
        return logs

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add one micro batch's share, a scalar, of the step's loss. The Trainer has scaled it already."""
        if len(self.losses) == self.done:
            self.losses.append(loss.float())
        else:
            self.losses[-1] = self.losses[-1] + loss.float()

    def add_norm(self, norm: torch.Tensor | float) -> None:
        """Take the gradient norm of the step at work, a scalar. One on a GPU is read with the loss."""
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's is a DTensor
        self.norm = torch.as_tensor(whole, dtype=torch.float64).detach().reshape(())

    def identify(self, args, model: torch.nn.Module) -> None:
        """Take down who the run is: its strategy, sizes and precision.

        Args:
            args: TrainingArguments.
            model: The model that trains, with LoRA's adapter around it if it has one.
        """
        self.output_dir = self.output_dir or Path(args.output_dir)
        self.strategy = self.strategy or strategy_of(args)
        self.device = args.device.type
        parameters, trainable = parameter_counts(model)
        not_quantized = None
        if not self.ends_with_training:  # without a recipe the gradients are quantized by DeepSpeed's own rule
            not_quantized = share_not_quantized(model, self.strategy)
        of_trainer = {
            "name": self.output_dir.name,
            "strategy": self.strategy.name,
            "zero_stage": self.strategy.zero_stage,
            "world_size": self.strategy.world_size,
            "device": hardware_facts(self.device).get("gpu", "cpu"),
            "model": getattr(getattr(model, "config", None), "name_or_path", None) or None,
            "parameters": parameters,
            "trainable_parameters": trainable,
            "gradients_not_quantized": not_quantized,
            "precision": computed_in(precision_of(args), getattr(model, "dtype", None)),
            "micro_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "max_length": getattr(args, "max_length", None),
        }
        self.identity = schema.RunIdentity(**of_trainer | self.known)
        self.used = probe.UsedFlops(self.identity)
        self.used.count(model)

    # called by the Trainer

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Begin to measure, from the first step that this process takes."""
        if self.finished:  # of an earlier training of the same Trainer
            self.begin()
        if self.identity is None:  # in anybody's Trainer
            self.identify(args, model)
        if state.global_step and not self.resumed_at:
            self.load_state_dict({}, state.global_step)
        if self.identity.precision == "fp32" or not self.strategy.is_deepspeed:
            self.exact_master_weights = True
        self.started_at = state.global_step
        total = state.max_steps - state.global_step
        self.warmup = probe.steps_not_timed(total)
        self.probed = 1 if total > 1 else 0
        self.record("engine_built")
        if self.device == "cuda":  # samples may have been generated, which use memory of their own
            torch.cuda.empty_cache()  # peaks begin again at what is reserved, and the allocator keeps what was freed
            torch.cuda.reset_peak_memory_stats()
        self.steps = probe.StepClock(self.device)
        engine = model if self.engine is None else self.engine
        self.probe = probe.StateProbe(model, optimizer, self.strategy, self.record)
        self.communication = CommunicationCounter(engine, self.strategy)
        if self.engine is None:
            self.clock.count_outside_as("train")
            self.forward_hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            self.write("running")
        if total:  # a resumed run may have no step left, and then nothing would stop it
            self.communication.start()
        self.steps.open()

    def _before_forward(self, model, arguments, inputs) -> None:
        """Count what a Trainer that hands nothing over gives its model."""
        if model.training and torch.is_grad_enabled() and "input_ids" in inputs:
            self.count_tokens(inputs)

    def on_step_begin(self, args, state, control, **kwargs):
        """Begin a step: what is sent and held in it counts."""
        self.communication.begin_step()
        if self.done == self.probed:  # the second one where there is one: Adam's states exist from it on
            self.probe.attach()

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        """End a step: its time, losses, tokens and bytes are known."""
        self.steps.close()
        if self.done < max(1, self.warmup):
            self.communication.end_step()
        self.done += 1
        self.skipped += bool(getattr(optimizer, "step_was_skipped", False))
        if self.losses:
            self._bring_losses_together()
        if self.probe.hooks:
            self.states = self.probe.detach()
        if self.done == max(1, self.warmup):
            self.communication.stop()
        self.steps.open()

    def _bring_losses_together(self) -> None:
        """A crash leaves the losses behind, and what must end a run ends it on every rank: all have to know before the
        next step. No other numbers of a step are read back from a GPU."""
        loss = self.losses[-1].double()
        norm = self.norm
        norm_or_0 = loss.new_zeros(()) if norm is None else norm.to(loss)
        signal = loss.new_full((), signalled())
        own = torch.stack([loss, norm_or_0, signal]).reshape(1, 3)
        everyone = gather_rows(own).tolist()
        losses, norms, signals = zip(*everyone, strict=True)
        self.signalled = any(signals)
        self.step_losses.append(sum(losses) / len(losses))
        bad_norms = [norm for norm in norms if not math.isfinite(norm)]
        worst_norm = bad_norms[0] if bad_norms else norms[0]
        self.last_step = (self.step_losses[-1], worst_norm)
        if norm is not None:
            self.grad_norms.append(norms[rank()])
        self.norm = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Take loss and gradient norm from the log of a Trainer that does not hand them over."""
        if not self.losses and logs and "loss" in logs and args.logging_steps == 1:
            self.logged_losses[state.global_step] = logs["loss"]
            if "grad_norm" in logs:
                self.grad_norms.append(logs["grad_norm"])
        self.steps.open()

    def on_save(self, args, state, control, **kwargs):
        """Leave the time of a save out of the next step's."""
        self.steps.open()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Take an evaluation's loss, and leave its time out of the next step's."""
        if metrics and "eval_loss" in metrics:
            self.evaluations.append(schema.Evaluation(step=state.global_step, loss=metrics["eval_loss"]))
        if self.finished and self.ends_with_training:
            self.write()
        self.steps.open()

    def on_train_end(self, args, state, control, **kwargs):
        """End the measurements, and write metrics.json where nothing follows the training."""
        self.end_steps()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.best_step = state.best_global_step
        if self.ends_with_training:
            self.write()
            self.clock.count_outside_as(None)

    def end_steps(self) -> None:
        """Complete the figures of the training. Collective."""
        if self.forward_hook is not None:
            self.forward_hook.remove()
        self.summary = self._summary()
        self.finished = True

    def _summary(self) -> schema.Measurements:
        """Of all ranks, those of the run that was resumed included. Collective."""
        losses = torch.stack(self.losses).double() if self.losses else torch.zeros(0, dtype=torch.float64)
        own = probe.RankFigures(
            peak=schema.PeakMemory(**peak_memory(self.device)),
            states=schema.ModelStateBytes(**self.states),
            losses=losses.cpu().tolist() if self.losses else self._logged(),
            tokens=self._counted(self.tokens),
            timed_tokens=self._counted(self.tokens_timed),
            timed_flops=self.used.of(self.tokens_timed),
        )
        ranks = gather_object([own])
        seconds = self.steps.seconds()
        if not seconds:  # a resumed run that had no step left
            peaks = schema.Measurements(peak_memory_bytes=[rank.peak for rank in ranks], loss_history=[])
            return peaks if self.earlier == schema.Measurements() else self.earlier
        now = probe.summarise(
            ranks,
            seconds,
            min(self.warmup, len(seconds)),
            self.used.peak,
            communication_bytes_per_step=self.communication.median(),
            communication_bytes_between_nodes=self.communication.median_between_nodes(),
            skipped_steps=self.skipped if self.identity.precision == "fp16" else None,
        )
        return probe.continued(self.earlier, now)

    def _counted(self, tokens: torch.Tensor | None) -> list[int | None]:
        """Tokens of this rank: all, non-padding, supervised (None where nothing says which carry the loss)."""
        every, non_padding, supervised = [0, 0, 0] if tokens is None else tokens[:3].tolist()
        return [every, non_padding, supervised if self.has_labels else None]

    def _logged(self) -> list[float] | None:
        """By the log; None where it has not each of them."""
        steps = range(self.started_at + 1, self.started_at + self.done + 1)
        return [self.logged_losses[step] for step in steps] if {*steps} <= self.logged_losses.keys() else None

    def states_so_far(self) -> dict[str, int]:
        """Model-state bytes of this rank, for a run that fails: the largest seen, or those of this moment."""
        if self.probe is None or any(self.states.values()):
            return self.states
        return self.probe.read()

    def losses_so_far(self) -> list[float]:
        """The losses of all steps of the run so far, known without a collective."""
        return [*(self.earlier.loss_history or []), *self.step_losses]

    def write(self, status: schema.Status = "ok", error: str | None = None) -> None:
        """Write metrics.json. Only rank 0 does.

        It is complete after `end_steps`. Before that, what was not measured is null.

        Args:
            status: How the run has ended, or "running".
            error: Why it has ended; of a running one, what is known of its save.
        """
        if rank():
            return
        if not self.finished:
            self.summary = self.summary.model_copy(update={"loss_history": self.losses_so_far()})
        self.clock.book()
        row = schema.Metrics(
            schema=schema.SCHEMA,
            status=status,
            error=error,
            **dict(self.identity),
            **dict(self.summary),
            memory_phases=self.phases if self.device == "cuda" else None,
            phase_seconds={name: round(spent, 3) for name, spent in self.clock.seconds.items()},
            first_step=self.first_step,
            resumed_at=self.resumed_at,
            exact_master_weights=self.exact_master_weights,
            stopped_early_at=self.stopped_early_at,
            best_step=self.best_step,
            grad_norm_history=self.grad_norms,
            eval_history=self.evaluations,
            predicted=self.predicted,
            versions=library_versions(),
            hardware=hardware_facts(self.device),
        )
        row.write(self.output_dir / schema.FILE)
