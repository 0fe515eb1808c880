"""Page-locked memory: what an allocation takes, and the limit that is set before torch starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from zero_recipes.core.pinned_memory import LIMIT_MIB, limit_rounding, pinned_bytes

SET = f"pinned_max_cached_size_mb:{LIMIT_MIB}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": SET}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": SET}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{SET}"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
            {"PYTORCH_ALLOC_CONF": f"a:1,{SET}", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb: 512"},
            {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb: 512"},
        ),
    ],
)
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
    assert pinned_bytes(47_384_000_000, {}) == 47_384_000_000  # by the limit that a run sets


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
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=bare, check=True).stdout
    assert said.strip() == f"expandable_segments:True,{SET}"


def test_torch_still_rounds_and_still_has_the_limit():
    """No longer needed where this fails: ATen/core/CachingHostAllocator.h, c10/core/AllocatorConfig.h of torch 2.13."""
    from pathlib import Path

    import torch

    headers = Path(torch.__file__).parent / "include"
    allocator = (headers / "ATen" / "core" / "CachingHostAllocator.h").read_text()
    assert "size <= pinned_max_cached_size()" in allocator and "return c10::llvm::PowerOf2Ceil(size);" in allocator
    config = (headers / "c10" / "core" / "AllocatorConfig.h").read_text()
    assert "size_t pinned_max_cached_size_{std::numeric_limits<size_t>::max()};" in config
