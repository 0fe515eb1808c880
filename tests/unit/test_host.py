"""The host's memory and cores for an optimizer on the CPU: page-locked memory, and threads."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.host import PINNED_LIMIT_MIB, limit_rounding, pinned_bytes
from zero_recipes.distributed.group import set_host_threads

SET = f"pinned_max_cached_size_mb:{PINNED_LIMIT_MIB}"
OWN = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb: 512"}
PYTHIA_12B = 47_384_000_000  # bytes of its fp32 weights


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": SET}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": f"a:1,{SET}"}),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
         {"PYTORCH_ALLOC_CONF": f"a:1,{SET}", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}),
        (OWN, OWN),
    ],
)  # fmt: skip
def test_the_limit_is_added_and_nothing_of_the_users_is_lost(before, after):
    environment = dict(before)
    limit_rounding(environment)
    limit_rounding(environment)  # the second time changes nothing
    assert environment == after


@given(size=draw.integers(2, 1 << 40), mib=draw.integers(1, 4096))
def test_only_what_the_limit_allows_is_rounded(size, mib):
    taken = pinned_bytes(size, {"PYTORCH_CUDA_ALLOC_CONF": f"x:1,pinned_max_cached_size_mb:{mib}"})
    if size > mib << 20:
        assert taken == size
    else:
        assert size <= taken < 2 * size and taken & (taken - 1) == 0
    assert pinned_bytes(PYTHIA_12B, {}) == PYTHIA_12B  # by the limit that a run sets


def test_a_recipe_puts_the_limit_into_force_before_torch_is_imported(tmp_path):
    (tmp_path / "r.yaml").write_text("env:\n  PYTORCH_ALLOC_CONF: expandable_segments:True\n")
    program = (
        "import sys, pathlib, os\n"
        "from zero_recipes.config.recipe import read_recipe_file\n"
        f"read_recipe_file(pathlib.Path({str(tmp_path / 'r.yaml')!r}))\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(torch._C._accelerator_getAllocatorSettings())\n"
    )
    bare = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=bare, check=True).stdout
    assert shown.strip() == f"expandable_segments:True,{SET}"


ON_HOST = DsConfig({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
OFFLOADED = Strategy("zero2_offload", 4, ON_HOST, "c.json")


@pytest.mark.parametrize(
    "strategy, device, variables, threads",
    [
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "1"}, 4),  # of 16 cores
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 8),  # two machines
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "3"}, 1),  # somebody's choice
        (OFFLOADED, "cpu", {"OMP_NUM_THREADS": "1"}, 1),  # the CPU trains
        (Strategy("zero2", 4, DsConfig({}), "c.json"), "cuda", {"OMP_NUM_THREADS": "1"}, 1),  # nothing is offloaded
    ],
)
def test_each_rank_takes_its_share_of_the_cores_for_an_optimizer_on_the_host(
    monkeypatch, strategy, device, variables, threads
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zero_recipes.core.host.Host.cores", lambda host: 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        set_host_threads(strategy, device)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
