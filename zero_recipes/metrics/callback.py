"""What a strategy cost: memory, model states, tokens per second, communication and loss of one run, in metrics.json.

Everything is read off the engine's own tensors and collectives; nothing here knows the formulas that it is compared
with. The contract of the file stands in docs/metrics.md.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from zero_recipes.compat import deepspeed_tensors
from zero_recipes.config.run import RunConfig
from zero_recipes.config.settings import precision_of
from zero_recipes.core import environment
from zero_recipes.core.files import write_json
from zero_recipes.core.process import rank
from zero_recipes.distributed import nvme
from zero_recipes.metrics.communication import CommunicationCounter
from zero_recipes.metrics.memory_probe import MemoryPhases, StateProbe
from zero_recipes.metrics.timers import EngineSeconds, PhaseClock, StepClock
from zero_recipes.models.load import parameter_counts

SCHEMA = 1

MOST_WARMUP_STEPS = 5


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
        predicted: dict[str, Any] | None = None,  # zero_recipes/planner/gate.py
    ):
        self.strategy, self.device, self.clock, self.predicted = run.strategy, run.device, clock, predicted
        self.disks, self.traffic, self.link, self.links = disks, nvme.Traffic(), link, links
        self.identity = identity(run, training_args, model)
        self.trainer: Any = None  # trainer.trainer.RecipeTrainer
        self.phases = MemoryPhases(run.device)
        self.phases.record("model_loaded")
        self.steps = StepClock(run.device)
        self.losses: list[torch.Tensor] = []  # one scalar per optimizer step, of this rank
        self.grad_norms: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.tokens: torch.Tensor | None = None  # all, non-padding, supervised; of this rank, over the whole run
        self.tokens_timed: torch.Tensor | None = None  # the same over the timed steps
        self.states = dict.fromkeys((*deepspeed_tensors.PARTS, "offloaded_host", "offloaded_disk"), 0)
        self.probe: StateProbe | None = None
        self.communication: CommunicationCounter | None = None
        self.engine_seconds: EngineSeconds | None = None
        self.warmup = 0
        self.done = 0
        self.summary: dict[str, Any] = {}
        self.earlier: dict[str, Any] = {}  # the summary of the run that wrote the checkpoint
        self.first_step = 1  # of loss_history
        self.resumed_at: list[int] = []

    def take_up(self, history: dict[str, Any], step: int) -> None:
        """Go on from what the checkpoint of `step` carries; `history` is empty where another program wrote it."""
        self.resumed_at = [*history.get("resumed_at", []), step]
        self.first_step = history.get("first_step", step + 1)
        self.earlier = history.get("summary", {})
        self.grad_norms += history.get("grad_norm_history", [])
        self.evaluations += history.get("eval_history", [])

    def history(self) -> dict[str, Any]:
        """What a checkpoint carries, for `take_up`. Every rank calls it (collectives)."""
        return {
            "summary": self._summary(),
            "grad_norm_history": self.grad_norms,
            "eval_history": self.evaluations,
            "first_step": self.first_step,
            "resumed_at": self.resumed_at,
        }

    def watch(self, trainer) -> None:
        """Join callback and trainer; TRL has put LoRA's adapter around the model by now, so count it again."""
        self.trainer, trainer.stage_metrics = trainer, self
        parameters, trainable = parameter_counts(trainer.model)
        self.identity |= {"parameters": parameters, "trainable_parameters": trainable}

    # called by RecipeTrainer

    def count_tokens(self, inputs: dict[str, torch.Tensor]) -> None:
        """Add one micro batch: input_ids and labels of shape (batch, length), attention_mask likewise or absent."""
        ids = inputs["input_ids"]
        shared = "shift_labels" in inputs  # this process's part of each row (zero_recipes/distributed/ulysses.py)
        supervised = inputs["shift_labels"] if shared else inputs["labels"][..., 1:]
        mask = inputs.get("attention_mask")
        non_padding = ids.new_tensor(ids.numel()) if mask is None else mask.sum()
        counted = torch.stack([ids.new_tensor(ids.numel()), non_padding, (supervised != -100).sum()])
        self.tokens = counted if self.tokens is None else self.tokens + counted
        if self.done >= self.warmup:
            self.tokens_timed = counted if self.tokens_timed is None else self.tokens_timed + counted

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add one micro batch's share of the step's loss (the Trainer has scaled it already)."""
        if len(self.losses) == self.done:
            self.losses.append(loss.float())
        else:
            self.losses[-1] = self.losses[-1] + loss.float()

    # called by the Trainer

    def on_train_begin(self, args, state, control, **kwargs):
        total = state.max_steps - state.global_step
        self.warmup = min(MOST_WARMUP_STEPS, total // 2)
        self.phases.record("engine_built")
        if self.device == "cuda":  # earlier callbacks have generated samples, which use memory of their own
            torch.cuda.reset_peak_memory_stats()
        self.probe = StateProbe(self.trainer, self.strategy, self.phases)
        self.communication = CommunicationCounter(self.trainer.model_wrapped, self.strategy.world_size)
        self.engine_seconds = EngineSeconds(self.trainer.model_wrapped)
        if total:  # a resumed run may have no step left, and then nothing would stop it
            self.communication.start()
        if self.disks:
            self.traffic.start()
        self.steps.open()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.done == min(1, self.warmup):  # Adam's states exist from the second step on
            self.probe.attach()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.close()
        if self.done < max(1, self.warmup):
            self.communication.end_step()
        self.done += 1
        if self.probe.attached:
            self.states = self.probe.detach()
        if self.done == max(1, self.warmup):
            self.communication.stop()
        self.steps.open()

    def on_log(self, args, state, control, **kwargs):
        self.steps.open()

    def on_save(self, args, state, control, **kwargs):
        self.steps.open()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics and "eval_loss" in metrics:
            self.evaluations.append({"step": state.global_step, "loss": metrics["eval_loss"]})
        self.steps.open()

    def end_steps(self) -> None:
        """Training has ended: the figures are complete. Every rank calls it (collectives)."""
        self.summary = self._summary()

    def _summary(self) -> dict[str, Any]:
        """Read peaks and bring all ranks' figures together, those of the run that was resumed included."""
        peak = environment.peak_memory(self.device)
        losses = torch.stack(self.losses).double() if self.losses else torch.zeros(0, dtype=torch.float64)
        tokens = torch.stack([_or_zeros(self.tokens), _or_zeros(self.tokens_timed)]).cpu()
        seconds = self.steps.seconds()
        own = {"peak": peak, "states": self.states, "losses": losses.cpu().tolist(), "tokens": tokens.tolist()}
        ranks = gather_object([own | {"traffic": self.traffic.per_step(self.done) if self.disks else None}])
        if not seconds:  # a resumed run that had no step left
            return {"peak_memory_bytes": [rank["peak"] for rank in ranks]} | self.earlier
        summary = _summarise(ranks, seconds, min(self.warmup, len(seconds) - 1))
        if self.earlier:
            summary["loss_history"] = self.earlier["loss_history"] + summary["loss_history"]
            summary["tokens"] = {key: count + self.earlier["tokens"][key] for key, count in summary["tokens"].items()}
        if self.disks:
            summary["nvme"] = {"disks": self.disks, "bytes_per_step": [rank["traffic"] for rank in ranks]}
        summary["engine_seconds"] = self.engine_seconds.median(self.warmup)
        summary["communication_bytes_per_step"] = self.communication.median()
        return summary | {"communication_bytes_between_nodes": self.communication.median_between_nodes()}

    def states_so_far(self) -> dict[str, int]:
        """Model-state bytes of this rank, for a run that fails: the largest seen, or those of this moment."""
        if self.probe is None or any(self.states.values()):
            return self.states
        return self.probe.read()

    def write(self, output_dir: Path, status: str = "ok", error: str | None = None) -> None:
        """Write metrics.json on rank 0: complete after `end_steps`, before it with null for what was not measured."""
        if rank():
            return
        measured = {
            "peak_memory_bytes": None,
            "memory_phases": self.phases.bytes if self.device == "cuda" else None,
            "host_memory_phases": self.phases.host_bytes,
            "model_state_bytes": None,
            "communication_bytes_per_step": None,
            "communication_bytes_between_nodes": None,
            "tokens": None,
            "tokens_per_second": None,
            "step_seconds": None,
            "engine_seconds": None,
            "nvme": None,
            "loss_history": [],
        } | self.summary
        document = {
            "schema": SCHEMA,
            "status": status,
            "error": error,
            **self.identity,
            **{key: measured[key] for key in ("peak_memory_bytes", "memory_phases", "host_memory_phases")},
            "model_state_bytes": measured["model_state_bytes"],
            **{key: size for key, size in measured.items() if key.startswith("communication_bytes_")},
            **{key: measured[key] for key in ("tokens", "tokens_per_second")},
            "step_seconds": measured["step_seconds"],
            "engine_seconds": measured["engine_seconds"],
            "nvme": measured["nvme"],
            "host_device_bytes_per_second": self.link,
            "host_threads": torch.get_num_threads(),
            "phase_seconds": {name: round(seconds, 3) for name, seconds in self.clock.seconds.items()},
            "loss_history": measured["loss_history"],
            "first_step": self.first_step,
            "resumed_at": self.resumed_at,
            "grad_norm_history": self.grad_norms,
            "eval_history": self.evaluations,
            "network": self.links,
            "predicted": self.predicted,
            "versions": environment.versions(),
            "hardware": environment.hardware(self.device),
        }
        write_json(output_dir / "metrics.json", document)


def identity(run: RunConfig, training_args, model: torch.nn.Module) -> dict[str, Any]:
    """Who this run is: the part of metrics.json that is known before the first step."""
    recipe, strategy = run.recipe, run.strategy
    parameters, trainable = parameter_counts(model)
    return {
        "name": recipe.name,
        "strategy": strategy.name,
        "zero_stage": strategy.zero_stage,
        "world_size": strategy.world_size,
        "device": environment.device_name(run.device),
        "model": recipe.settings.model_name_or_path,
        "parameters": parameters,
        "trainable_parameters": trainable,
        "precision": precision_of(training_args),
        "micro_batch_size": training_args.per_device_train_batch_size,
        "gradient_accumulation_steps": training_args.gradient_accumulation_steps,
        "max_length": training_args.max_length,
        "recipe_sha256": recipe.sha256,
    }


def _summarise(ranks: list[dict], seconds: list[float], warmup: int) -> dict[str, Any]:
    names = ("all", "non_padding", "supervised")
    totals, timed_totals = ([sum(rank["tokens"][i][k] for rank in ranks) for k in range(3)] for i in (0, 1))
    timed = seconds[warmup:]
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {
        "peak_memory_bytes": [rank["peak"] for rank in ranks],
        "model_state_bytes": [rank["states"] for rank in ranks],
        "tokens": dict(zip(names, totals, strict=True)),
        "tokens_per_second": {k: total / sum(timed) for k, total in zip(names, timed_totals, strict=True)},
        "step_seconds": {
            "median": statistics.median(timed),
            "p90": sorted(timed)[min(len(timed) - 1, int(0.9 * len(timed)))],
            "warmup_steps_excluded": warmup,
        },
        "loss_history": losses,
    }


def _or_zeros(tokens: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.int64) if tokens is None else tokens
