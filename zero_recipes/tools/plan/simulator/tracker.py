"""Counts the storages that live while a program runs under fake tensors: how much, of what part, at which operator."""

import functools
import os
import sys
import weakref
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_recipes.core.host import pinned_bytes
from zero_recipes.metrics.schema import PARTS
from zero_recipes.tools.plan.simulator.stand_ins import ASKED_FOR, answer_for_number

# Where a tensor made in this file belongs; the innermost frame that is named decides.
_PART_OF_FILE = {
    "trl/kernels/chunked_logprob.py": "loss_head",
    "deepspeed/runtime/zero/stage3.py": "buckets",
    "deepspeed/runtime/zero/stage_1_and_2.py": "buckets",
    "deepspeed/runtime/zero/partition_parameters.py": "buckets",
    "deepspeed/runtime/zero/partitioned_param_coordinator.py": "buckets",
    "deepspeed/runtime/comm/coalesced_collectives.py": "buckets",
    "deepspeed/runtime/fp16/unfused_optimizer.py": "grads",
    "deepspeed/runtime/bf16_optimizer.py": "grads",
    "torch/optim/adam.py": "optimizer",
    "torch/optim/adamw.py": "optimizer",
    "torch/autograd/graph.py": None,  # who has called backward does not matter
}
_PART_OF_PHASE = dict.fromkeys(("forward", "backward", "evaluation"), "activations") | {"best model": "optimizer"}
_DEVICE = torch.ops.prim.device.default
_DEPTH = 80  # frames looked at, from the innermost


# Answered without FakeTensorMode's questions: more than half of a step's operators; they make no storage. It builds
# a long key for each (torch 2.13, torch/_subclasses/fake_tensor.py `_cached_dispatch_impl`).
_aten = torch.ops.aten
VIEWS = {_aten._unsafe_view.default, _aten.as_strided.default, _aten.detach.default, _aten.expand.default}
VIEWS |= {_aten.slice.Tensor, _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.view.default}


class Observed(TorchDispatchMode):
    """Sees every operator of a program: answers for numbers that fake tensors lack, shows the results to trackers."""

    def __init__(self, *trackers: "LiveStorages"):
        super().__init__()
        self.trackers = trackers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that says so costs more than what it wraps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKED_FOR:
            return answer_for_number(func, args)
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked more often than all else together, and slowly answered by the mode
        if func in VIEWS:
            return view_of(func, args, kwargs)
        out = func(*args, **kwargs)
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out) if isinstance(out, (tuple, list)) else ()
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                device = leaf.fake_device.type if type(leaf) is FakeTensor else leaf.device.type
                for tracker in self.trackers:
                    if device == tracker.device:
                        tracker.see(leaf)
        return out


def view_of(func, args: tuple, kwargs: dict):
    """The view of what the fake tensor stands on."""
    base = args[0]
    if type(base) is not FakeTensor or kwargs:
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(base.fake_mode):
        view = func(*args)
    return FakeTensor(base.fake_mode, view, base.fake_device)


class LiveStorages:
    """Bytes of all storages alive on one kind of device, each counted once, from its first operator to its end. A
    storage's part (of PARTS) is guessed where it is made, by the file that makes it and the phase, and set right by
    `assign` for tensors that are known: weights, gradients, optimizer states."""

    def __init__(self, device: str, block: int = 1):
        """`block`: sizes are rounded up to it."""
        self.device, self.block = device, block
        self.live, self.phase = 0, "build"
        self.parts = dict.fromkeys(PARTS, 0)
        self.is_pinned = False  # whether what is made now is page-locked memory of the host
        self._known: dict[int, list] = {}  # storage: [bytes, part, its weak reference]
        self.forget_peaks()

    def forget_peaks(self) -> None:
        """Start the peaks again from what lives now."""
        self.peaks: dict[str, int] = {}  # of each phase
        self.at_peak: dict[str, dict[str, int]] = {}
        self._look()

    def enter(self, phase: str) -> None:
        """Name what comes now: "forward", "backward", "step", "between", "evaluation" or "best model"."""
        self.phase = phase
        self._look()

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Say of which part these tensors' storages are."""
        for tensor in tensors:
            entry = self._known.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self.parts[entry[1]] -= entry[0]
                self.parts[part] += entry[0]
                entry[1] = part

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of an operator's result, unless it is known."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        size = pinned_bytes(size, os.environ) if self.is_pinned else -(-size // self.block) * self.block
        part = self._part()
        self._known[key] = [size, part, weakref.ref(storage, lambda _, key=key: self._drop(key))]
        self.live += size
        self.parts[part] += size
        self._look()

    def _drop(self, key: int) -> None:
        size, part, _ = self._known.pop(key)
        self.live -= size
        self.parts[part] -= size

    def _look(self) -> None:
        if self.live > self.peaks.get(self.phase, -1):
            self.peaks[self.phase] = self.live
            self.at_peak[self.phase] = dict(self.parts)

    def _part(self) -> str:
        """By the innermost frame of a file that is known; else by the phase."""
        frame, depth = sys._getframe(2), 0
        while frame is not None and depth < _DEPTH:
            known = _part_of_file(frame.f_code.co_filename)
            if known is None:
                break
            if known:  # in a step: fp32 copies and flat gradients, stage_1_and_2.py and stage3.py `step`
                return "grads" if known == "buckets" and self.phase == "step" else known
            frame, depth = frame.f_back, depth + 1
        return _PART_OF_PHASE.get(self.phase, "other")


@functools.cache
def _part_of_file(name: str) -> str | None:
    """The part of what this file makes; "" of a file that is not known, None where the search ends."""
    return next((part for file, part in _PART_OF_FILE.items() if name.endswith(file)), "")
