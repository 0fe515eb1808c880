"""The page about the machine: a pod with GPUs, one whose driver is too old, and this machine itself."""

import json
import os
from importlib import metadata

import pytest

from tests.helpers import fake_cuda
from tests.unit.test_machine import machine
from zero_recipes.checks import machine as machines
from zero_recipes.cli import env
from zero_recipes.cli import main as cli
from zero_recipes.core import units

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
    shown = env._readable("", found)
    whole = json.dumps(found)
    assert "hf_abc" not in whole and "WANDB" not in whole and found["variables"]["HF_TOKEN"] == "(set, not shown)"
    assert (gpu["name"], shown["gpus"][0]["free"], gpu["capability"]) == ("NVIDIA Stand-in", "53.7 GB", "9.0")
    assert (found["cuda"]["driver"], found["cuda"]["nccl"]) == ("550.54.15", "2.27.5")
    assert any("GPU0" in line and "NV18" in line and "\x1b" not in line for line in found["links"])
    assert (shown["memory"]["limited_by"], shown["memory"]["lockable"]) == ("the cgroup's memory.max", "8.39 MB")


def test_torchs_words_stand_where_no_gpu_can_be_used(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "The NVIDIA driver on your system is too old")
    found = env.machine(pod(tmp_path))
    assert found["gpus"] == [] and found["cuda"]["refusal"] == "The NVIDIA driver on your system is too old"


def test_the_command_prints_a_page_and_json(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"]["name"] in text and units.size(found["memory"]["machine_bytes"]) in text
    assert found["cpu"]["cores"] <= os.cpu_count()
    assert found["versions"]["deepspeed"] == metadata.version("deepspeed")
