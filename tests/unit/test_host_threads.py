"""The optimizer on the host gets the machine's cores, which the launchers do not give it."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.run import config_from_args, get_args_parser

from tests.helpers.thread_cases import OFFLOADED, SixteenCores
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.distributed import group as host_threads


@pytest.fixture
def threads():
    """torch.get_num_threads, and its number again at the end."""
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, 4),  # by torchrun and accelerate launch
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 8),  # the other two ranks are on another machine
        ({"LOCAL_SIZE": "4"}, 4),  # by the deepspeed launcher, which lets every rank take all cores
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "32"}, 1),
    ],
)
def test_each_rank_takes_its_share_of_the_cores(threads, variables, expected):
    assert host_threads.set_host_threads(OFFLOADED, "cuda", variables, SixteenCores()) == expected == threads()
    assert host_threads.host_threads_header(expected) == [
        f"host threads  {expected} a process for the optimizer on the CPU"
    ]


@pytest.mark.parametrize(
    "strategy, device, variables",
    [
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "3"}),
        (OFFLOADED, "cpu", {"OMP_NUM_THREADS": "1"}),
        (Strategy("zero2", 4, DsConfig({}), "ds_configs/zero2.json"), "cuda", {"OMP_NUM_THREADS": "1"}),
    ],
    ids=["somebody's choice", "the CPU trains", "nothing is offloaded"],
)
def test_other_numbers_stay(threads, strategy, device, variables):
    before = threads()
    assert host_threads.set_host_threads(strategy, device, variables, SixteenCores()) is None
    assert threads() == before
    assert host_threads.host_threads_header(None) == []


@pytest.mark.private
def test_a_launcher_still_leaves_each_rank_one_thread(monkeypatch):
    """Fails when torchrun, which accelerate calls for DeepSpeed, gives ranks their share: then host_threads may go."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what the launcher sets is undone with this one
    monkeypatch.delenv("OMP_NUM_THREADS")
    config_from_args(get_args_parser().parse_args(["--nproc_per_node", "2", "run_sft.py"]))
    assert os.environ["OMP_NUM_THREADS"] == "1"
