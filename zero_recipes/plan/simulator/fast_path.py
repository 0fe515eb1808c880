"""Answers of FakeTensorMode without its questions, for the operators that a training step asks most often.

The mode builds a long key for each operator, and looks for kernels of its own for collectives (torch 2.13,
torch/_subclasses/fake_tensor.py `_cached_dispatch_impl`); here what an operator is known to do decides.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

aten, c10d = torch.ops.aten, torch.ops.c10d

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
