"""The simulation's shortcuts answer what FakeTensorMode answers, operator by operator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.tiny import ROOT
from zero_recipes.plan.simulator.tracker import COLLECTIVES, IN_PLACE, SHORTCUTS, VIEWS, LiveStorages, Observed

aten = torch.ops.aten
VIEWED = {
    aten._unsafe_view.default: ([6, 3],),
    aten.as_strided.default: ([2, 2], [6, 1], 8),
    aten.detach.default: (),
    aten.expand.default: ([2, 3, 6],),
    aten.slice.Tensor: (1, 2, 5),
    aten.t.default: (),
    aten.transpose.int: (0, 1),
    aten.unsqueeze.default: (1,),
    aten.view.default: ([2, 9],),
}
CHANGED = {  # the arguments after the first; None: another tensor
    aten.add_.Tensor: (None,),
    aten.addcdiv_.default: (None, None),
    aten.addcmul_.default: (None, None),
    aten.copy_.default: (None,),
    aten.div_.Tensor: (2,),
    aten.fill_.Scalar: (0,),
    aten.lerp_.Scalar: (None, 0.1),
    aten.mul_.Tensor: (0.5,),
    aten.normal_.default: (0.0, 0.02),
    aten.uniform_.default: (-0.1, 0.1),
    aten.zero_.default: (),
}


def test_every_shortcut_is_tried_below():
    assert set(VIEWED) == set(VIEWS) and set(CHANGED) == set(IN_PLACE)
    assert set(SHORTCUTS) == {*VIEWS, *IN_PLACE, *COLLECTIVES}


@pytest.mark.parametrize("func", VIEWED, ids=str)
def test_views_are_those_of_the_mode(func):
    with FakeTensorMode():
        base = torch.empty(4, 6, dtype=torch.bfloat16)[1:]
        asked, own = func(base, *VIEWED[func]), SHORTCUTS[func](func, (base, *VIEWED[func]), {})
    for what in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(own, what) == getattr(asked, what)
    assert (own.stride(), own.storage_offset()) == (asked.stride(), asked.storage_offset())
    assert own.untyped_storage()._cdata == asked.untyped_storage()._cdata == base.untyped_storage()._cdata


@pytest.mark.parametrize("func", CHANGED, ids=str)
def test_what_is_changed_in_place_is_answered(func):
    with FakeTensorMode():
        handed = [torch.empty(6, 6), *(torch.empty(6, 6) if other is None else other for other in CHANGED[func])]
        assert func(*handed) is handed[0]
        assert SHORTCUTS[func](func, handed, {}) is handed[0]


def test_tensors_with_numbers_keep_them():
    """A simulated run holds some: the seeds of its generators, ids of its rows."""
    numbers = torch.arange(6.0)
    with FakeTensorMode(allow_non_fake_inputs=True), Observed(LiveStorages("cpu")):
        numbers.add_(1)
        assert (numbers.view(2, 3) + 0).shape == (2, 3)
    assert numbers.tolist() == [1, 2, 3, 4, 5, 6]


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
    assert ended.stdout.splitlines()[-1] == "same True 0 48", ended.stderr  # of 32 and 16 bytes, both gone
