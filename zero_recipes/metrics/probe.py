"""Looks into optimizer steps: model states where they can be largest, memory after each phase, seconds."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

from zero_recipes.config.strategy import Strategy
from zero_recipes.distributed import nvme
from zero_recipes.libs.deepspeed import base_optimizer, state_bytes
from zero_recipes.metrics.parts import GradientDtypes

MOST_WARMUP_STEPS = 5
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    call of the inner optimizer. `optimizer`: as accelerate has wrapped it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, strategy: Strategy, phases: MemoryPhases):
        self.model, self.phases, self.strategy = model, phases, strategy
        self.parameters = list(model.parameters())  # within a step FSDP2 puts gathered ones in their place
        inner = optimizer.optimizer if strategy.is_deepspeed else optimizer
        self.states_of = inner if strategy.is_deepspeed else base_optimizer(inner)
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
        inner = base_optimizer(self.states_of)
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
        now = state_bytes(self.model, self.parameters, self.states_of, *self.offload)
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


def gradient_dtypes(engine: torch.nn.Module) -> GradientDtypes | None:
    """In which precision a step's gradients are added up over its micro batches and reduced over the ranks.

    Read off the engine, once there is one; None where it is another precision than these three.
    DeepSpeed 0.19.8, runtime/engine.py: `get_data_types` (data_types.grad_accum_dtype, else the model's) and
    `communication_data_type`; torch_autocast.py gives each its own. FSDP2 (torch,
    _fsdp_param.py `to_accumulated_grad_if_needed`) adds up what is not yet reduced in its reduce_dtype. DDP adds up
    and reduces the gradients of fp32 weights, whatever autocast computes in.
    """
    if hasattr(engine, "get_data_types"):
        dtypes = engine.get_data_types()[1], engine.communication_data_type
        if engine.torch_autocast_enabled() and engine.zero_optimization():
            return GradientDtypes(added_up=DTYPES[dtypes[0]], reduced="bf16 and fp32")
    else:
        weights = next((p.dtype for p in engine.parameters() if p.requires_grad), torch.float32)
        dtypes = ((_fsdp_reduce_dtype() if isinstance(engine, FSDPModule) else None) or weights,) * 2
    if not set(dtypes) <= set(DTYPES):
        return None
    return GradientDtypes(added_up=DTYPES[dtypes[0]], reduced=DTYPES[dtypes[1]])


def _fsdp_reduce_dtype() -> torch.dtype | None:
    from accelerate.state import AcceleratorState

    policy = AcceleratorState().fsdp_plugin.mixed_precision_policy
    return policy.reduce_dtype if policy else None


class StepClock:
    """Durations of optimizer steps, data loading included, what the Trainer does between steps (logs, evaluation,
    checkpoints) excluded. On CUDA by events, so that no step waits for the device."""

    def __init__(self, device: str) -> None:
        self.on_cuda = device == "cuda"
        self.start_mark = None
        self.steps: list[tuple] = []

    def open(self) -> None:
        """The next step begins here. Called again, it moves the beginning."""
        self.start_mark = self._mark()

    def close(self) -> None:
        self.steps.append((self.start_mark, self._mark()))
        self.open()

    def seconds(self, first: int = 0) -> list[float]:
        """One duration per closed step, from the `first` on."""
        if self.on_cuda:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in self.steps[first:]]
        return [end - start for start, end in self.steps[first:]]

    def _mark(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def steps_not_timed(total: int) -> int:
    """How many of `total` optimizer steps are not timed: the first that compiles and allocates, and the second, which
    the probe of the memory slows down; more of a longer run, at most half of it and five."""
    return min(total, max(2, min(MOST_WARMUP_STEPS, total // 2)))
