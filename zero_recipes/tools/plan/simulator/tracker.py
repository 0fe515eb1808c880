"""Counts the storages that live while a program runs under fake tensors: how much, of what part, at which operator."""

import functools
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_recipes.core.allocator import pinned_bytes
from zero_recipes.metrics.schema import PARTS
from zero_recipes.tools.plan.simulator.stand_ins import ASKED_FOR, answer_for_number

_DEVICE = torch.ops.prim.device.default
_DEPTH = 80  # frames looked at, from the innermost

# More than half of a step's operators; they make no storage. Answered without FakeTensorMode, which builds a long key
# for each (torch 2.13, torch/_subclasses/fake_tensor.py `_cached_dispatch_impl`).
_aten = torch.ops.aten
VIEWS = {
    _aten._unsafe_view.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}

# Where a tensor made in this file belongs. The innermost named frame decides.
PART_OF_FILE = {
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
PART_OF_PHASE = {
    "forward": "activations",
    "backward": "activations",
    "evaluation": "activations",
    "best model": "optimizer",
}


class Observed(TorchDispatchMode):
    """Sees every operator: answers for missing numbers, shows results to trackers."""

    def __init__(self, *trackers: "LiveStorages"):
        super().__init__()
        self.trackers = trackers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs more than what it wraps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKED_FOR:
            return answer_for_number(func, args)
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked more often than all else, and slowly answered by the mode
        if func in VIEWS:
            return view_of(func, args, kwargs)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
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


@dataclass
class _Storage:
    bytes: int
    part: str  # of PARTS
    reference: weakref.ref  # calls `_drop` at its end


class LiveStorages:
    """Bytes of all storages alive on one kind of device, each counted once, from its first operator to its end.

    A storage's part is guessed by the file that makes it and the phase.
    `assign` sets it right for weights, gradients and optimizer states.
    """

    def __init__(self, device: str, block: int = 1):
        """`block`: sizes are rounded up to it."""
        self.device = device
        self.block = block
        self.live = 0
        self.phase = "build"
        self.parts = dict.fromkeys(PARTS, 0)
        self.is_pinned = False  # whether what is made now is page-locked memory of the host
        self._known: dict[int, _Storage] = {}
        self.forget_peaks()

    def forget_peaks(self) -> None:
        """Begin to look for peaks anew."""
        self.peaks: dict[str, int] = {}  # of each phase
        self.at_peak: dict[str, dict[str, int]] = {}
        self._look()

    def enter(self, phase: str) -> None:
        """Name what comes now: "forward", "backward", "step", "between", "evaluation" or "best model"."""
        self.phase = phase
        self._look()

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count the tensors' storages to this part from now on."""
        for tensor in tensors:
            storage = self._known.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                self.parts[storage.part] -= storage.bytes
                self.parts[part] += storage.bytes
                storage.part = part

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, until nothing holds it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        size = pinned_bytes(size, os.environ) if self.is_pinned else -(-size // self.block) * self.block
        part = self._part()
        self._known[key] = _Storage(size, part, weakref.ref(storage, functools.partial(self._drop, key)))
        self.live += size
        self.parts[part] += size
        self._look()

    def _drop(self, key: int, _: weakref.ref) -> None:
        storage = self._known.pop(key)
        self.live -= storage.bytes
        self.parts[storage.part] -= storage.bytes

    def _look(self) -> None:
        if self.live > self.peaks.get(self.phase, -1):
            self.peaks[self.phase] = self.live
            self.at_peak[self.phase] = dict(self.parts)

    def _part(self) -> str:
        frame = sys._getframe(2)
        for _ in range(_DEPTH):
            known = _part_of_file(frame.f_code.co_filename) if frame else None
            if known is None:
                break
            if known:  # in a step: fp32 copies and flat gradients, stage_1_and_2.py and stage3.py `step`
                return "grads" if known == "buckets" and self.phase == "step" else known
            frame = frame.f_back
        return PART_OF_PHASE.get(self.phase, "other")


@functools.cache
def _part_of_file(name: str) -> str | None:
    """The part of what this file makes; "" of an unknown file, None where the search ends."""
    for file, part in PART_OF_FILE.items():
        if name.endswith(file):
            return part
    return ""
