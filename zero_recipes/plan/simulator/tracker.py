"""Counts the storages that live while a program runs under fake tensors: how much, of what part, at which operator."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zero_recipes.core.host import pinned_bytes
from zero_recipes.metrics.prediction import PARTS
from zero_recipes.plan.simulator.patches import ASKED_FOR, answer_for_number

aten, c10d = torch.ops.aten, torch.ops.c10d

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
_HEAD_DEPTH = 80  # frames looked at, from the innermost


class Observed(TorchDispatchMode):
    """Sees every operator of a program: answers for numbers that fake tensors lack, shows the results to trackers."""

    def __init__(self, *trackers: LiveStorages):
        super().__init__()
        self.trackers = trackers
        self.counts_flops, self.flops = False, 0
        self.remembered = Remembered()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that says so costs more than what it wraps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKED_FOR:
            return answer_for_number(func, args)
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked more often than all else together, and slowly answered by the mode
        shortcut = SHORTCUTS.get(func)
        if shortcut is not None:
            return shortcut(func, args, kwargs)
        out = self.remembered.answer(func, args, kwargs) if func in PURE else func(*args, **kwargs)
        if self.counts_flops:
            self.flops += flops_of(func, args, kwargs, out)
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out) if isinstance(out, (tuple, list)) else ()
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                device = leaf.fake_device.type if type(leaf) is FakeTensor else leaf.device.type
                for tracker in self.trackers:
                    if device == tracker.device:
                        tracker.see(leaf, func)
        return out


class LiveStorages:
    """Bytes of all storages alive on one kind of device, each counted once, from its first operator to its end.

    A storage's part (job.PARTS) is guessed where it is made, by the file that makes it and the phase, and set right by
    `assign` for tensors that are known: weights, gradients, optimizer states.
    """

    def __init__(self, device: str, block: int = 1, stream: Callable[[], int] | None = None):
        """`block`: sizes are rounded up to it. `stream`: says which stream an allocation is for; events are kept."""
        self.device, self.block, self.stream = device, block, stream
        self.live = 0
        self.parts = dict.fromkeys(PARTS, 0)
        self.phase = "build"
        self.peaks: dict[str, int] = {}  # of each phase
        self.operators: dict[str, str] = {}  # where each phase's peak stands
        self.at_peak: dict[str, dict[str, int]] = {}
        # ("alloc", number, bytes, stream), ("free", number), ("empty",), ("phase", name): what allocator.py replays
        self.events: list[tuple] | None = [] if stream else None
        self._known: dict[int, list] = {}  # storage: [bytes, part, its weak reference, number]
        self._made = 0
        self._size_of = self._in_blocks

    def enter(self, phase: str) -> None:
        """Name what comes now: "build", "forward", "backward", "step", "between", "evaluation" or "best model"."""
        self.phase = phase
        if self.events is not None:
            self.events.append(("phase", phase))
        self._look("")

    @contextlib.contextmanager
    def pinning(self) -> Iterator[None]:
        """What is made within is page-locked memory of the host."""
        self._size_of = lambda size: pinned_bytes(size, os.environ)
        try:
            yield
        finally:
            self._size_of = self._in_blocks

    def _in_blocks(self, size: int) -> int:
        return -(-size // self.block) * self.block

    def forget_peaks(self) -> None:
        """Start the peaks again from what lives now."""
        self.peaks, self.operators, self.at_peak = {}, {}, {}
        self._look("")

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Say of which part these tensors' storages are."""
        for tensor in tensors:
            entry = self._known.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry[1] != part:
                self.parts[entry[1]] -= entry[0]
                self.parts[part] += entry[0]
                entry[1] = part

    def see(self, tensor: torch.Tensor, func) -> None:
        """Count the storage of an operator's result, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = self._size_of(storage.nbytes())
        part = self._part()
        self._made += 1
        self._known[key] = [size, part, weakref.ref(storage, lambda _, key=key: self._drop(key)), self._made]
        self.live += size
        self.parts[part] += size
        if self.events is not None:
            self.events.append(("alloc", self._made, size, self.stream()))
        self._look(func)

    def _drop(self, key: int) -> None:
        size, part, _, made = self._known.pop(key)
        self.live -= size
        self.parts[part] -= size
        if self.events is not None:
            self.events.append(("free", made))

    def _look(self, func) -> None:
        if self.live > self.peaks.get(self.phase, -1):
            self.peaks[self.phase] = self.live
            self.operators[self.phase] = str(func) if func else ""
            self.at_peak[self.phase] = dict(self.parts)

    def _part(self) -> str:
        """By the innermost frame of a file that is known; else by the phase."""
        frame, depth = sys._getframe(2), 0
        while frame is not None and depth < _HEAD_DEPTH:
            name = frame.f_code.co_filename
            known = _known_file(name)
            if known is None:
                break
            if known:
                if known == "buckets" and self.phase == "step":
                    return "grads"  # fp32 copies and flat gradients, stage_1_and_2.py and stage3.py `step`
                return known
            frame, depth = frame.f_back, depth + 1
        return _PART_OF_PHASE.get(self.phase, "other")


def flops_of(func, args: tuple, kwargs: dict, out) -> int:
    """Floating-point operations of one operator: matrix products, attention (torch.utils.flop_counter)."""
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


_files: dict[str, str | None] = {}


def _known_file(name: str) -> str | None:
    """The part of what this file makes; "" of a file that is not known, None where the search ends."""
    if name not in _files:
        _files[name] = next((part for file, part in _PART_OF_FILE.items() if name.endswith(file)), "")
    return _files[name]


# Answers of FakeTensorMode without its questions, for the operators that a training step asks most often. The mode
# builds a long key for each operator, and looks for kernels of its own for collectives (torch 2.13,
# torch/_subclasses/fake_tensor.py `_cached_dispatch_impl`); here what an operator is known to do decides.
VIEWS = (  # more than half of a step's operators; they make no storage
    aten._unsafe_view.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)
IN_PLACE = (  # each answers its first argument, and makes nothing
    aten.add_.Tensor,
    aten.addcdiv_.default,
    aten.addcmul_.default,
    aten.copy_.default,
    aten.div_.Tensor,
    aten.fill_.Scalar,
    aten.lerp_.Scalar,
    aten.mul_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
)
# each answers its first argument and what its caller may wait for; a pretended group moves nothing
FAST_COLLECTIVES = (
    c10d._allgather_base_.default,
    c10d._reduce_scatter_base_.default,
    c10d.allreduce_.default,
    c10d.broadcast_.default,
)
PURE = {  # each makes one new tensor, whose form follows from its arguments'
    aten._to_copy.default,
    aten.abs.default,
    aten.add.Tensor,
    aten.addmm.default,
    aten.amax.default,
    aten.amin.default,
    aten.cat.default,
    aten.clone.default,
    aten.div.Tensor,
    aten.empty.memory_format,
    aten.eq.Tensor,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.linalg_vector_norm.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.mm.default,
    aten.mul.Tensor,
    aten.ne.Scalar,
    aten.neg.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.slice_backward.default,
    aten.sum.dim_IntList,
    aten.where.self,
    aten.zeros_like.default,
}


def view_of(func, args: tuple, kwargs: dict):
    """For VIEWS: the view of what the fake tensor stands on."""
    base = args[0]
    if type(base) is not FakeTensor or kwargs:
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(base.fake_mode):
        view = func(*args)
    return FakeTensor(base.fake_mode, view, base.fake_device)


def changed(func, args: tuple, kwargs: dict):
    """For IN_PLACE."""
    return args[0] if type(args[0]) is FakeTensor else func(*args, **kwargs)


def collective(func, args: tuple, kwargs: dict):
    """For COLLECTIVES: the group's own answer."""
    first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    if type(first) is not FakeTensor:
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(first.fake_mode):
        _, work = func(*args, **kwargs)
    return args[0], work


SHORTCUTS = (
    dict.fromkeys(VIEWS, view_of) | dict.fromkeys(IN_PLACE, changed) | dict.fromkeys(FAST_COLLECTIVES, collective)
)


class Remembered:
    """For PURE: the form of the mode's answer, kept by the form of the arguments."""

    def __init__(self):
        self._made: dict[tuple, tuple] = {}

    def answer(self, func, args: tuple, kwargs: dict):
        """What the operator makes: by the mode the first time, as it was then from the second on."""
        key = func, torch.get_default_dtype(), form_of(args), form_of(tuple(kwargs.items()))
        known = self._made.get(key)
        if known is not None:
            mode, size, stride, dtype, device = known
            with in_kernel_invocation_manager(mode):
                empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            return FakeTensor(mode, empty, device)
        out = func(*args, **kwargs)
        if type(out) is FakeTensor:
            self._made[key] = out.fake_mode, out.size(), out.stride(), out.dtype, out.fake_device
        return out


def form_of(value):
    """All of an argument that decides of what form a result is: of tensors no number, of numbers the type too."""
    if type(value) is FakeTensor:
        return value.size(), value.stride(), value.dtype, value.fake_device
    if isinstance(value, torch.Tensor):
        return object()  # one with numbers is like no other
    if isinstance(value, (list, tuple)):
        return tuple(form_of(one) for one in value)
    return type(value), value
