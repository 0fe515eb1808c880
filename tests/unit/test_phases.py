"""Each moment of a run belongs to one phase, and the report draws them as one bar a run."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.report_runs import metrics
from zero_recipes.core import phases
from zero_recipes.core.phases import PHASES, PhaseClock
from zero_recipes.core.process import age
from zero_recipes.metrics.parts import PhaseSeconds
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.report import phases_plot

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def now(monkeypatch):
    moment = [100.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: moment[0])
    return moment


def test_the_fields_are_the_phases_and_those_of_earlier_versions():
    assert list(PhaseSeconds.model_fields) == [*PHASES, "data", "samples_before", "train", "samples_after", "save"]
    assert set(phases.STAGES.values()) <= set(PHASES) and set(phases_plot.COLOURS) == set(PHASES)


def test_phases_inside_another_are_taken_out_of_it(now):
    clock = PhaseClock(before=7.0)
    now[0] += 1
    clock.begin_run()
    with clock.phase("train"):
        now[0] += 2
        with clock.phase("samples_before"):
            now[0] += 3
        now[0] += 1
        clock.switch("steps")
        now[0] += 5
        with clock.phase("saving", failing="train"):
            now[0] += 0.5
        now[0] += 1
    now[0] += 0.25
    clock.book()
    expected = {"imports": 8, "first_step": 3, "steps": 6, "sampling": 3, "saving": 0.5, "other": 0.25}
    assert clock.seconds == dict.fromkeys(PHASES, 0.0) | expected
    clock.begin_run()  # a second run in the same process
    now[0] += 2
    clock.book()
    assert clock.seconds == dict.fromkeys(PHASES, 0.0) | {"other": 2}


def test_a_failure_says_the_innermost_stage(now):
    for inner, said in ((("save",), "save"), (("saving", "train"), "train"), (("kernels",), "kernels")):
        clock = PhaseClock()
        with pytest.raises(ValueError), clock.phase("train"), clock.phase(*inner):
            assert clock.current == said
            raise ValueError
        assert clock.failed == said and clock.current == "imports"


@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_run_does_the_phases_sum_up_to_its_time(now, seed):
    chance = random.Random(seed)
    clock, begin = PhaseClock(before=3.5), now[0]

    def some(depth: int) -> None:
        for _ in range(chance.randrange(4)):
            now[0] += chance.random()
            if depth < 4:
                with clock.phase(chance.choice([*PHASES, *phases.STAGES])):
                    some(depth + 1)
            if chance.random() < 0.3:
                clock.switch(chance.choice(PHASES))

    some(0)
    now[0] += 1
    clock.book()
    assert sum(clock.seconds.values()) == pytest.approx(3.5 + now[0] - begin)


def test_the_age_of_this_process_is_the_kernels():
    """psutil counts from a boot time in whole seconds."""
    assert age() == pytest.approx(time.time() - psutil.Process().create_time(), abs=2)


def measured(tmp_path, name: str, **seconds) -> MeasuredRun:
    content = metrics(name) | ({"phase_seconds": seconds} if seconds else {})
    return MeasuredRun.model_validate(content | {"folder": tmp_path / name, "samples": []})


def test_one_bar_a_run_and_the_names_of_earlier_versions(tmp_path):
    old = measured(tmp_path, "zero0")
    new = measured(tmp_path, "zero2", imports=5.0, checks=0.5, first_step=1.0, steps=20.0, other=0.25)
    assert phases_plot.seconds_by_phase(old) == {
        **{"imports": 7.5, "tokenising": 1.0, "model": 2.0, "steps": 4.0, "sampling": 6.0, "saving": 1.0}
    }
    assert sum(phases_plot.seconds_by_phase(new).values()) == 26.75
    picture = phases_plot.draw([old, new], "a setting", tmp_path / "phases.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    none = new.model_copy(update={"phase_seconds": None})
    assert phases_plot.draw([none], "a setting", tmp_path / "none.png") is None


IMPORTS = """
import gc
from zero_recipes.core.process import imported_for_good
collections = lambda: sum(generation["collections"] for generation in gc.get_stats())
before = collections()
with imported_for_good():
    import email.message, http.client, xml.dom.minidom
    kept = [[number] for number in range(100_000)]
during, frozen = collections() - before, gc.get_freeze_count()
again = [[number] for number in range(100_000)]
print(during, frozen > 100_000, gc.isenabled(), collections() > before)
"""


def test_imports_are_not_searched_for_garbage_and_all_else_is():
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True", "True", "True"], done.stderr
