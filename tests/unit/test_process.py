"""A run's process: which of a launch's it is, and the time that it spends in each phase."""

import os
import time
from pathlib import Path
from unittest import mock

import pytest

from zero_recipes.config.recipe import split_command_line
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.process import PhaseClock
from zero_recipes.distributed.group import start_process_group


@pytest.mark.parametrize(
    ("words", "environment", "rank"),
    [
        (["--local_rank=3"], {}, "3"),
        (["--local-rank", "3"], {}, "3"),
        (["--local_rank", "3"], {"LOCAL_RANK": "1"}, "1"),
    ],
)
def test_the_deepspeed_launchers_local_rank_goes_to_the_environment(words, environment, rank):
    """It passes one to each process; the launcher's own environment counts more."""
    with mock.patch.dict("os.environ", environment, clear=True) as left:
        argv = [*words, "r.yaml", "--traceback", "--max_steps", "2"]
        assert split_command_line(argv) == (Path("r.yaml"), ["--max_steps", "2"])
        assert left["LOCAL_RANK"] == rank


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # torchrun --nproc_per_node 1


@pytest.fixture
def launched(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


def test_one_process_of_torchrun_is_alone(launched):
    start_process_group(Strategy("single", 1, None, None), "cpu", 60, set())
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.private
def test_accelerate_still_takes_a_local_rank_for_a_group(launched):
    """No longer needed where this fails: accelerate 1.15, state.py `_prepare_backend`."""
    import inspect

    from accelerate.state import PartialState

    source = inspect.getsource(PartialState._prepare_backend)
    assert 'elif int(os.environ.get("LOCAL_RANK", -1)) != -1 and not cpu:' in source


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
