"""Six phases sum up to a process's age, however they are nested, and a failure names the innermost."""

import time

import pytest

from zero_recipes.core.process import PhaseClock


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
