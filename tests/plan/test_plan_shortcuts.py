"""The simulation's shortcuts answer what FakeTensorMode answers, operator by operator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.tiny import ROOT
from zero_recipes.plan.simulator.tracker import (
    FAST_COLLECTIVES,
    IN_PLACE,
    PURE,
    SHORTCUTS,
    VIEWS,
    LiveStorages,
    Observed,
    Remembered,
)

aten = torch.ops.aten
VIEWED = [
    (aten._unsafe_view.default, ([6, 3],)),
    (aten.as_strided.default, ([2, 2], [6, 1], 8)),
    (aten.detach.default, ()),
    (aten.expand.default, ([2, 3, 6],)),
    (aten.slice.Tensor, (1, 2, 5)),
    (aten.t.default, ()),
    (aten.transpose.int, (0, 1)),
    (aten.unsqueeze.default, (1,)),
    (aten.view.default, ([2, 9],)),
]


def row() -> torch.Tensor:
    return torch.empty(6, dtype=torch.bfloat16)


def square() -> torch.Tensor:
    return torch.empty(6, 6, dtype=torch.bfloat16).t()


def single() -> torch.Tensor:
    return torch.empty(6, 6, dtype=torch.float32)


def truth() -> torch.Tensor:
    return torch.empty(6, 6, dtype=torch.bool)


# operator: (arguments, keywords); a function stands for the tensor that it makes
MADE = {
    aten._to_copy.default: [((square,), {"dtype": torch.float32}), ((square,), {"dtype": torch.float16})],
    aten.abs.default: [((square,), {})],
    aten.add.Tensor: [((square, row), {}), ((square, single), {}), ((truth, 1.0), {}), ((truth, 1), {})],
    aten.addmm.default: [((row, square, square), {})],
    aten.amax.default: [((square,), {}), ((square, [0]), {})],
    aten.amin.default: [((square,), {})],
    aten.cat.default: [(([square, square], 1), {}), (([square, single], 0), {})],
    aten.clone.default: [((square,), {}), ((square,), {"memory_format": torch.contiguous_format})],
    aten.div.Tensor: [((square, 2), {}), ((truth, 2), {})],
    aten.empty.memory_format: [(([3, 4],), {}), (([0],), {})],
    aten.eq.Tensor: [((square, single), {})],
    aten.gelu.default: [((square,), {})],
    aten.gelu_backward.default: [((square, square), {})],
    aten.linalg_vector_norm.default: [((square,), {}), ((square,), {"dtype": torch.float32})],
    aten.logical_and.default: [((truth, square), {})],
    aten.logical_not.default: [((square,), {})],
    aten.mm.default: [((square, square), {})],
    aten.mul.Tensor: [((square, row), {}), ((square, single), {})],
    aten.ne.Scalar: [((square, 0.0), {})],
    aten.neg.default: [((square,), {})],
    aten.silu.default: [((square,), {})],
    aten.silu_backward.default: [((square, square), {})],
    aten.slice_backward.default: [((row, [9], 0, 2, 8, 1), {})],
    aten.sum.dim_IntList: [((square, [0], True), {}), ((truth, [1]), {})],
    aten.where.self: [((truth, square, single), {})],
    aten.zeros_like.default: [((square,), {}), ((square,), {"dtype": torch.float32})],
}
CHANGED = {
    aten.add_.Tensor: ((square, single), {"alpha": 2}),
    aten.addcdiv_.default: ((single, single, single), {"value": -0.1}),
    aten.addcmul_.default: ((single, single, single), {"value": 0.1}),
    aten.copy_.default: ((square, single), {}),
    aten.div_.Tensor: ((square, 2), {}),
    aten.fill_.Scalar: ((square, 0), {}),
    aten.lerp_.Scalar: ((single, single, 0.1), {}),
    aten.mul_.Tensor: ((square, 0.5), {}),
    aten.normal_.default: ((square, 0.0, 0.02), {}),
    aten.uniform_.default: ((square, -0.1, 0.1), {}),
    aten.zero_.default: ((square,), {}),
}


def with_tensors(value):
    """The same arguments with each function's tensor in its place."""
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(one) for one in value)
    return value() if callable(value) else value


def same_form(own: torch.Tensor, asked: torch.Tensor) -> bool:
    return type(own) is type(asked) and all(
        said(own, what) == said(asked, what)
        for what in ("shape", "stride", "storage_offset", "dtype", "device", "is_contiguous", "requires_grad")
    )


def said(tensor: torch.Tensor, what: str):
    found = getattr(tensor, what)
    return found() if callable(found) else found


def test_every_shortcut_is_tried_below():
    assert {func for func, _ in VIEWED} == set(VIEWS)
    assert set(MADE) == PURE
    assert set(CHANGED) == set(IN_PLACE)
    assert set(SHORTCUTS) == {*VIEWS, *IN_PLACE, *FAST_COLLECTIVES}


@pytest.mark.parametrize("func, arguments", VIEWED, ids=str)
def test_views_are_those_of_the_mode(func, arguments):
    with FakeTensorMode():
        base = torch.empty(4, 6, dtype=torch.bfloat16)[1:]
        asked, own = func(base, *arguments), SHORTCUTS[func](func, (base, *arguments), {})
    assert same_form(own, asked)
    assert own.untyped_storage()._cdata == asked.untyped_storage()._cdata == base.untyped_storage()._cdata


CALLS = [(func, *call) for func, calls in MADE.items() for call in calls]


@pytest.mark.parametrize("func, arguments, keywords", CALLS)
def test_what_is_made_has_the_form_that_the_mode_gives_it(func, arguments, keywords):
    """The second answer is the shortcut's. Other calls of the operator before it must not be mistaken for this one."""
    remembered = Remembered()
    with FakeTensorMode():
        for others, their_keywords in MADE[func]:
            remembered.answer(func, with_tensors(others), their_keywords)
        handed = with_tensors(arguments)
        asked, own = func(*handed, **keywords), remembered.answer(func, handed, keywords)
        third = remembered.answer(func, handed, keywords)
    assert same_form(own, asked)
    assert own.untyped_storage().nbytes() == asked.untyped_storage().nbytes()
    apart = [asked, own, third, *filter(torch.is_tensor, handed)]
    assert len({one.untyped_storage()._cdata for one in apart}) == len(apart)


@pytest.mark.parametrize("func", CHANGED, ids=str)
def test_what_is_changed_in_place_is_answered(func):
    arguments, keywords = CHANGED[func]
    with FakeTensorMode():
        handed = with_tensors(arguments)
        assert func(*handed, **keywords) is handed[0]
        assert SHORTCUTS[func](func, handed, keywords) is handed[0]


def test_tensors_with_numbers_keep_them():
    """A simulated run holds some: the seeds of its generators, ids of its rows."""
    numbers = torch.arange(6.0)
    with FakeTensorMode(allow_non_fake_inputs=True), Observed(LiveStorages("cpu")):
        numbers.add_(1)
        assert (numbers.view(2, 3) + 0).shape == (2, 3)
    assert numbers.tolist() == [1, 2, 3, 4, 5, 6]
    one, other = Remembered().answer(aten.neg.default, (numbers,), {}), -numbers
    assert torch.equal(one, other)


PRETENDED = """
import torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from zero_recipes.plan.simulator.tracker import LiveStorages, Observed

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def step():
    whole, part = torch.empty(8), torch.empty(4)
    answers = [dist.all_reduce(whole), dist.broadcast(whole, 0), dist.all_gather_into_tensor(whole, part)]
    works = [dist.all_gather_into_tensor(whole, part, async_op=True)]
    works += [dist.reduce_scatter_tensor(part, whole, async_op=True)]
    return answers, [type(work).__name__ for work in works], [work.wait() for work in works], whole.shape, part.shape

with FakeTensorMode():
    asked = step()
    tracker = LiveStorages("cpu")
    with Observed(tracker):
        own = step()
print("\\nsame", asked == own, tracker.live, max(tracker.peaks.values()))
"""


def test_collectives_answer_as_the_group_does():
    ended = subprocess.run([sys.executable, "-c", PRETENDED], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "same True 0 48"  # two tensors of 32 and 16 bytes, both gone
