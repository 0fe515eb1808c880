"""Runs end cleanly, every time: a rank that leaves with a live gloo group aborts some runs with exit code -6."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tiny import write_recipe
from zero_recipes.sweep import launch_command

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("zero3", "zero0", "ddp", "zero2")


@pytest.mark.grid
def test_20_of_20_runs_exit_0(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=2)
    codes = []
    for number in range(20):
        config = ROOT / "accelerate_configs" / f"{STRATEGIES[number % len(STRATEGIES)]}.yaml"
        command = launch_command(recipe, config, 2, tmp_path / str(number), [], ROOT / "run_sft.py")
        codes.append(subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode)
    assert codes == [0] * 20
