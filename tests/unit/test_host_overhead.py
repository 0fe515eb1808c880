"""What the libraries do in every step that need be done once."""

from __future__ import annotations

import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import numa

from zero_recipes.compat import patches


@pytest.mark.private
def test_the_machine_is_asked_once_for_its_numa_nodes(monkeypatch):
    """Fails where DeepSpeed asks once itself: patches.remember_numa_cores may go."""
    asked = []

    def check_output(command):
        asked.append(command[0])
        raise FileNotFoundError

    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setattr(numa.subprocess, "check_output", check_output)
    monkeypatch.setattr(numa, "get_numa_cores", getattr(numa.get_numa_cores, "__wrapped__", numa.get_numa_cores))
    assert [CPU_Accelerator().device_count() for _ in range(3)] == [1] * 3 and asked == ["numactl"] * 3
    patches.remember_numa_cores()
    patches.remember_numa_cores()
    assert [CPU_Accelerator().device_count() for _ in range(3)] == [1] * 3 and len(asked) == 4
