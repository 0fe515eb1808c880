"""One process without DeepSpeed is no group, whatever launched it: accelerate is not to wrap its model in DDP."""

import os

import pytest

from zero_recipes.config.strategy import Strategy
from zero_recipes.distributed.group import start_process_group

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
