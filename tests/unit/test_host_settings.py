"""What a run sets on its host: torch's allocator, and the threads of an optimizer there."""

import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as draw

from tests.helpers.seeded import grid
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.allocator import PINNED_LIMIT_MIB, pinned_bytes, set_allocator
from zero_recipes.engine.speed.host_threads import set_host_threads

SET = f"pinned_max_cached_size_mb:{PINNED_LIMIT_MIB}"
BOTH = f"expandable_segments:True,{SET}"
OWN = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb: 512"}
HOOK = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": BOTH}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": SET}),  # somebody's choice, too
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": f"a:1,{SET}"}),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
         {"PYTORCH_ALLOC_CONF": f"a:1,{SET}", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}),
        (OWN, OWN),
        (HOOK, HOOK | {"PYTORCH_ALLOC_CONF": SET}),
    ],
)  # fmt: skip
def test_the_allocator_is_set_and_nothing_of_the_users_is_lost(before, after):
    environment = dict(before)
    set_allocator(environment)
    set_allocator(environment)  # the second time changes nothing
    assert environment == after


@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}])
def test_torch_before_the_limit_of_pinned_memory_is_not_given_it(monkeypatch, own):
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.11.0+cu130"}.get)
    environment = dict(own)
    set_allocator(environment)
    assert environment == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@given(size=draw.integers(2, 1 << 40), mib=draw.integers(1, 4096))
@example(size=3 << 20, mib=3)  # a block as large as the limit
@example(size=(3 << 20) + 1, mib=3)
def test_only_what_the_limit_allows_is_rounded(size, mib):
    taken = pinned_bytes(size, {"PYTORCH_CUDA_ALLOC_CONF": f"x:1,pinned_max_cached_size_mb:{mib}"})
    if size > mib << 20:
        assert taken == size
    else:
        assert size <= taken < 2 * size and taken & (taken - 1) == 0
    assert pinned_bytes(47_384_000_000, {}) == 47_384_000_000  # Pythia-12B in fp32, by the limit that a run sets


@pytest.mark.parametrize(
    ("written", "in_force"),
    [grid("", BOTH), ("env:\n  PYTORCH_ALLOC_CONF: expandable_segments:False\n", f"expandable_segments:False,{SET}")],
)
def test_a_recipe_sets_the_allocator_before_torch_is_imported_and_torch_takes_it(tmp_path, written, in_force):
    """And says nothing about it."""
    (tmp_path / "r.yaml").write_text(f"max_steps: 1\n{written}")
    program = (
        "import os, sys, pathlib\n"
        "from zero_recipes.config.recipe import read_recipe_file\n"
        f"os.environ.update(read_recipe_file(pathlib.Path({str(tmp_path / 'r.yaml')!r})).environment)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(torch._C._accelerator_getAllocatorSettings())\n"
    )
    bare = {name: value for name, value in os.environ.items() if "ALLOC" not in name}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=bare, check=True)
    assert (ended.stdout.strip(), ended.stderr) == (in_force, "")


ON_HOST = DsConfig({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
OFFLOADED = Strategy("zero2_offload", 4, ON_HOST, "c.json")


@pytest.mark.parametrize(
    "strategy, device, variables, threads",
    [
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "1"}, [4]),  # of 16 cores
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, [8]),  # two machines
        (OFFLOADED, "cuda", {"OMP_NUM_THREADS": "3"}, []),  # somebody's choice
        (OFFLOADED, "cpu", {"OMP_NUM_THREADS": "1"}, []),  # the CPU trains
        (Strategy("zero2", 4, DsConfig({}), "c.json"), "cuda", {"OMP_NUM_THREADS": "1"}, []),  # nothing is offloaded
    ],
)
def test_a_rank_takes_its_cores_for_an_optimizer_on_the_host(monkeypatch, strategy, device, variables, threads):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zero_recipes.core.host.Host.cores", lambda host: 16)
    taken = []
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    set_host_threads(strategy, device)
    assert taken == threads
