"""The page about the machine: a pod with GPUs, one whose driver is too old, and this machine itself."""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers import fake_cuda
from tests.unit.test_machine import machine
from zero_recipes.checks import machine as machines
from zero_recipes.cli import env
from zero_recipes.cli import main as cli
from zero_recipes.core import units
from zero_recipes.libs import huggingface

TOPOLOGY = """#!/bin/sh
[ "$*" = "topo -m" ] && printf '\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n'
"""
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Release Build\n"
LIMITS = "Max locked memory         8388608              8388608              bytes     \n"


@pytest.fixture
def cuda(monkeypatch):
    cuda = fake_cuda.install(monkeypatch)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "")
    return cuda


def pod(root):
    files = {
        "/usr/bin/nvidia-smi": TOPOLOGY,
        "/proc/driver/nvidia/version": NVRM,
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "500000000\n",
        "/sys/fs/cgroup/cpu.max": "100000 100000\n",
        "/proc/self/limits": LIMITS,
        "/sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
    }
    secrets = {"HF_TOKEN": "hf_abc", "WANDB_API_KEY": "w"}
    return machine(root, files, 7 * 10**9, NCCL_DEBUG="INFO", UNRELATED="x", **secrets)


def test_a_pod_is_shown_as_its_container_may_use_it(cuda, tmp_path):
    cuda.hold(30 * fake_cuda.GIB)
    found = env.machine(pod(tmp_path))
    (gpu,) = found["gpus"]
    assert gpu["free_bytes"] == 50 * fake_cuda.GIB and gpu["memory_bytes"] == 80 * fake_cuda.GIB
    assert (found["memory"]["free_bytes"], found["cpu"]["cores"]) == (500_000_000, 1)
    assert found["memory"]["lockable_bytes"] == 8 << 20
    assert found["infiniband"] == {"mlx5_0": False}
    assert {disk["free_bytes"] for disk in found["disks"]} == {7 * 10**9}
    assert found["variables"]["NCCL_DEBUG"] == "INFO" and "UNRELATED" not in found["variables"]
    shown = {title: env._lines(part) for title, part in found.items()}
    whole = json.dumps(found) + str(shown)
    assert "hf_abc" not in whole and "WANDB" not in whole and found["variables"]["HF_TOKEN"] == "(set, not shown)"
    assert "name: NVIDIA Stand-in, memory: 85.9 GB, free: 53.7 GB, capability: 9.0" in shown["gpus"]
    assert {"driver: 550.54.15", "built_for: 13.0", "nccl: 2.27.5"} <= set(shown["cuda"])
    assert any("GPU0" in line and "NV18" in line and "\x1b" not in line for line in shown["links"])
    assert {"limited_by: the cgroup's memory.max", "lockable: 8.39 MB"} <= set(shown["memory"])
    assert shown["infiniband"] == ["mlx5_0: no"]


def test_torchs_words_stand_where_no_gpu_can_be_used(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "The NVIDIA driver on your system is too old")
    found = env.machine(pod(tmp_path))
    assert found["gpus"] == []
    assert "refusal: The NVIDIA driver on your system is too old" in env._lines(found["cuda"])


def test_a_version_outside_of_the_range_stands_out(monkeypatch):
    monkeypatch.setattr(env, "library_versions", lambda: dict.fromkeys(huggingface.tested_versions(), "9.9.9"))
    lines = env._lines(env.machine(env.Host())["versions"])
    assert sum(line.endswith("is_tested: no") for line in lines) >= len(huggingface.tested_versions()) - 2


def test_the_command_prints_a_page_and_json(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"]["name"] in text and units.size(found["memory"]["machine_bytes"]) in text
    assert found["cpu"]["cores"] <= os.cpu_count()
    assert all(title in text for title in ("GPUs", "Memory", "Disks", "Versions"))
    assert all(version["is_tested"] is not False for name, version in found["versions"].items() if name == "deepspeed")
