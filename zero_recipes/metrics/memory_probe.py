"""Looks into one optimizer step: model states where they can be largest, allocated memory after each phase."""

from __future__ import annotations

import psutil
import torch
from trl import SFTTrainer

from zero_recipes.config.strategy import Strategy
from zero_recipes.distributed import nvme
from zero_recipes.libs import deepspeed_tensors


class MemoryPhases:
    """Bytes after each phase of the first steps: allocated on the accelerator, resident on the host."""

    def __init__(self, device: str):
        self.on_cuda = device == "cuda"
        self.bytes: dict[str, int] = {}
        self.host_bytes: dict[str, int] = {}
        self.process = psutil.Process()

    def record(self, name: str) -> None:
        if self.on_cuda:
            self.bytes[name] = torch.cuda.memory_allocated()
        self.host_bytes[name] = self.process.memory_info().rss


class StateProbe:
    """Reads the model states at every point of one optimizer step at which they can be largest.

    Gradients are largest while the backward pass ends (stage 1 holds them whole only until then) or inside the
    optimizer (DeepSpeed makes fp32 copies there), so both are read: after each parameter's gradient, and before each
    call of the inner optimizer.
    """

    def __init__(self, trainer: SFTTrainer, strategy: Strategy, phases: MemoryPhases):
        self.model, self.phases, self.strategy = trainer.model, phases, strategy
        self.parameters = list(self.model.parameters())  # within a step FSDP2 puts gathered ones in their place
        self.optimizer = trainer.optimizer
        engine_optimizer = getattr(trainer.model_wrapped, "optimizer", None)
        self.states_of = (
            engine_optimizer if strategy.is_deepspeed else deepspeed_tensors.base_optimizer(trainer.optimizer)
        )
        self.offload = (strategy.offload_optimizer is not None, strategy.offload_param is not None)
        self.largest: dict[str, int] = {}
        self.hooks: list = []

    @property
    def attached(self) -> bool:
        return bool(self.hooks)

    def attach(self) -> None:
        for p in self.parameters:
            if p.requires_grad:
                self.hooks.append(p.register_post_accumulate_grad_hook(self._after_gradient))
        self.hooks.append(self.model.register_forward_hook(self._after_forward))
        inner = deepspeed_tensors.base_optimizer(self.states_of)
        self.hooks.append(inner.register_step_pre_hook(self._before_optimizer))

    def detach(self) -> dict[str, int]:
        """End the step; the largest bytes of each part within it."""
        self.read()
        self.phases.record("step")
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        return self.largest

    def read(self) -> dict[str, int]:
        """Read all parts now; the largest bytes of each so far."""
        now = deepspeed_tensors.state_bytes(self.model, self.parameters, self.states_of, *self.offload)
        now["offloaded_disk"] = nvme.swapped_bytes(self.strategy)
        self.largest = {part: max(self.largest.get(part, 0), size) for part, size in now.items()}
        return self.largest

    def _after_forward(self, *_arguments) -> None:
        self.phases.record("forward")
        self.read()  # gradients of the micro steps before this one: FSDP2 keeps them whole until the last

    def _before_optimizer(self, *_arguments) -> None:
        self.read()  # returns None: a torch optimizer takes a hook's value for new arguments

    def _after_gradient(self, _parameter: torch.Tensor) -> None:
        self.phases.record("backward")
        self.read()
