"""Six phases sum up to a process's age, however they are nested, and a failure names the innermost."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from zero_recipes.core.process import PHASES, PhaseClock

NESTED = draw.recursive(
    draw.just([]), lambda inner: draw.lists(draw.tuples(draw.sampled_from(PHASES), draw.floats(0, 9), inner))
)


@pytest.fixture
def now(monkeypatch):
    """A clock in a list, which a test turns."""
    moment = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


def test_a_phase_inside_another_is_taken_out_of_it_and_a_failure_names_the_innermost(now):
    clock = PhaseClock(before=3.5)
    with clock.phase("train"):
        now[0] += 2
        with clock.phase("eval"):
            now[0] += 5
        now[0] += 1
    now[0] += 0.25
    clock.book()
    assert clock.seconds == {"startup": 3.75, "data": 0, "model": 0, "train": 3, "eval": 5, "save": 0}
    with pytest.raises(ValueError), clock.phase("train"), clock.phase("save"):
        raise ValueError
    assert clock.failed == "save"


@given(NESTED)
def test_whatever_a_run_does_the_phases_sum_up_to_its_time(phases):
    moment, spent = [0.0], [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: moment[0])
        clock = PhaseClock(before=3.5)

        def go_through(inner) -> None:
            for name, seconds, deeper in inner:
                with clock.phase(name):
                    moment[0] += seconds
                    spent[0] += seconds
                    go_through(deeper)

        go_through(phases)
        clock.book()
    assert sum(clock.seconds.values()) == pytest.approx(3.5 + spent[0])
