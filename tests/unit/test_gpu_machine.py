"""A GPU machine as a fake root shows it: its driver, and what a run on GPUs needs there."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from tests.helpers.tiny import ROOT
from tests.unit.test_machine import machine, said
from zero_recipes.checks import driver

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
MODULE = "NVRM version: NVIDIA UNIX {}x86_64 Kernel Module  {}  Release Build\nGCC version: gcc 12.2.0\n"


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def pod(root, version="550.54.15", gpus=1, **environment):
    files = {f"/dev/nvidia{number}": "" for number in range(gpus)}
    files |= {"/proc/driver/nvidia/version": MODULE.format("", version)} if version else {}
    return machine(root, files, **environment)


def found(host, reason="", use_cpu=False):
    return list(driver.driver_findings(use_cpu, host, lambda: reason))


def test_a_driver_that_is_too_old_is_refused_with_both_cures(cuda_build, tmp_path):
    (finding,) = found(pod(tmp_path), TOO_OLD)
    assert (finding.code, finding.level, finding.scope) == ("ZR650", "error", "machine")
    assert "550.54.15" in finding.what and "CUDA 13.0" in finding.what and TOO_OLD in finding.why
    assert "580" in finding.why and "newer driver" in finding.fix and "older CUDA" in finding.fix
    assert "image" in finding.fix and "use_cpu: true" in finding.fix


def test_no_driver_finding_where_the_cpu_is_meant_or_no_gpu_is_here(cuda_build, tmp_path, monkeypatch):
    assert found(pod(tmp_path / "cpu"), TOO_OLD, use_cpu=True) == []
    for hidden in ("", "-1"):
        assert found(pod(tmp_path / "hidden", CUDA_VISIBLE_DEVICES=hidden), TOO_OLD) == []
    assert found(machine(tmp_path / "laptop", {"/dev/nvidiactl": "", "/dev/nvidia-uvm": ""}), "no driver") == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert found(pod(tmp_path / "sound", "580.65.06"), "") == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    assert found(pod(tmp_path / "cpu-build"), "Torch not compiled with CUDA enabled") == []


def test_the_driver_is_held_against_any_cuda_by_its_oldest_release(monkeypatch, tmp_path):
    """Where libcuda says nothing of its version, the kernel module's is enough."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    draw = random.Random(13)
    for number in range(30):
        major, branch = draw.choice([11, 12, 13]), draw.randint(390, 700)
        monkeypatch.setattr("torch.version.cuda", f"{major}.{draw.randint(0, 9)}")
        written = f"{branch}.{draw.randint(10, 200)}" + draw.choice(["", ".05"])
        host = pod(tmp_path / str(number), written)
        (finding,) = found(host, "CUDA unknown error")
        needed = {11: 450, 12: 525, 13: 580}[major]
        assert finding.code == ("ZR650" if branch < needed else "ZR651") and written in finding.what


def test_both_kinds_of_kernel_module_are_read(tmp_path):
    written = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
    assert driver.driver_version(machine(tmp_path, {"/proc/driver/nvidia/version": written})) == "570.86.15"
    assert driver.driver_version(pod(tmp_path / "closed")) == "550.54.15"
    assert driver.driver_version(machine(tmp_path / "other", {"/proc/driver/nvidia/version": "?"})) is None


@pytest.mark.parametrize(
    ("gpus", "environment", "reason", "cure"),
    [
        (0, {}, "Found no NVIDIA driver on your system.", "--gpus all"),
        (8, {}, "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "fabric manager"),
        (2, {"CUDA_VISIBLE_DEVICES": "7"}, "No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES is 7"),
        (1, {}, "Found no NVIDIA driver on your system.", "libcuda.so is not found"),
        (1, {}, "CUDA unknown error", "nvidia-smi"),
    ],
)
def test_other_reasons_come_with_torchs_own_words(cuda_build, tmp_path, gpus, environment, reason, cure):
    (finding,) = found(pod(tmp_path, "580.65.06", gpus, **environment), reason)
    assert finding.code == "ZR651" and reason in finding.why and cure in finding.fix
    assert "driver 580.65.06" in finding.what and ("/dev/nvidia0" in finding.what) == (gpus > 0)


def test_device_files_that_this_user_may_not_open(cuda_build, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("nvidia1"))
    (finding,) = found(pod(tmp_path, "580.65.06", 2), "CUDA unknown error")
    assert "Make /dev/nvidia1 readable" in finding.fix


def test_torch_itself_is_asked_why():
    """The CPU build refuses by another sentence; a CUDA build without a driver by its own."""
    if torch.cuda.is_available():
        assert driver.refusal_of_cuda() == ""
    else:
        said_by_torch = driver.refusal_of_cuda()
        assert "Torch not compiled with CUDA" in said_by_torch or "driver" in said_by_torch


# libcuda.so.1 of another driver: its version and the answer of cuInit come from the environment
LIBCUDA = """#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = atoi(getenv("FAKE_CUDA")); return 0; }
int cuInit(unsigned flags) { return atoi(getenv("FAKE_CUINIT")); }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""
ASK = """import sys
from pathlib import Path
from zero_recipes.checks.driver import driver_findings
from zero_recipes.core.host_limits import Host
print(*driver_findings(False, Host(Path(sys.argv[1]), {})))
"""


@pytest.mark.skipif(torch.version.cuda is None or not shutil.which("gcc"), reason="torch is no CUDA build")
def test_a_cuda_build_of_torch_under_other_drivers(tmp_path):
    """torch's real words: a library stands in for the driver's, and torch asks it in a process of its own."""
    (tmp_path / "fake.c").write_text(LIBCUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "fake.c"], cwd=tmp_path, check=True)
    too_old, current = (
        str((int(torch.version.cuda.split(".")[0]) - 1) * 1000),
        torch.version.cuda.replace(".", "0") + "0",
    )
    for version, answer, code, words in (
        (too_old, "0", "ZR650", "driver on your system is too old"),
        (current, "802", "ZR651", "fabric manager"),
        (current, "999", "ZR651", "CUDA unknown error"),
    ):
        root = pod(tmp_path / answer, "999.1").root  # the kernel module says nothing here
        fake = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_CUDA": version, "FAKE_CUINIT": answer, "PYTHONPATH": str(ROOT)}
        asked = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ASK, root], env=os.environ | fake, capture_output=True, text=True
        )
        assert f"[{code}]" in asked.stdout and words in asked.stdout, asked.stdout + asked.stderr


def test_a_run_on_such_a_pod_is_refused_and_use_cpu_trains(cuda_build, tmp_path, monkeypatch):
    """The whole preflight: nothing else is said of a recipe that is otherwise sound."""
    from tests.helpers.tiny import write_recipe
    from zero_recipes.checks import preflight
    from zero_recipes.config import recipe as recipes

    monkeypatch.setattr(driver, "nvidia_devices", lambda host: ["/dev/nvidia0"])
    monkeypatch.setattr(driver, "driver_version", lambda host: "550.54.15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = write_recipe(tmp_path)
    for use_cpu, expected in (("false", ["ZR650"]), ("true", [])):
        overrides = ["--output_dir", str(tmp_path / "out"), "--use_cpu", use_cpu]
        _, findings = preflight.preflight(path, recipes.read_recipe_file(path), overrides, {})
        assert [finding.code for finding in findings if finding.level == "error"] == expected, said(findings)
