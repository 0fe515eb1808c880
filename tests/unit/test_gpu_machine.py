"""A GPU machine as a fake root shows it: its driver, and what a run on GPUs needs there."""

from __future__ import annotations

import math
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig

import pytest
import torch
from zero_recipes.checks.nvme import nvme_findings
from zero_recipes.checks.triton import cache_folder, triton_findings

from tests.helpers.tiny import ROOT
from tests.unit.test_machine import ADAM, build, ds_config, machine, run_of, said, settings, without  # noqa: F401
from zero_recipes.checks import driver, gpus, infiniband
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.host_limits import Host
from zero_recipes.distributed.kernels import ops_of

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


# Triton


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_triton_available", lambda: True)


def gcc(root, **environment):
    return machine(root, {"/usr/bin/gcc": "#!/bin/sh\n"}, HOME="/home/me", **environment)


def test_triton_needs_a_compiler_and_headers_before_anything_is_loaded(triton, tmp_path):
    assert said(triton_findings("cuda", gcc(tmp_path / "sound"))) == ""
    bare = without(gcc(tmp_path / "bare"), "/usr/bin/gcc")  # c++ is still there, which Triton does not call
    assert said(triton_findings("cuda", bare)) == "error: there is no C compiler (gcc or clang) [ZR652]"
    assert said(triton_findings("cpu", bare)) == ""
    clang = machine(tmp_path / "clang", {"/usr/bin/clang": "#!/bin/sh\n"})
    assert said(triton_findings("cuda", clang)) == ""
    assert "compiler (icx -O2) [ZR652]" in said(triton_findings("cuda", gcc(tmp_path / "cc", CC="icx -O2")))
    headers = without(gcc(tmp_path / "headers"), f"{sysconfig.get_path('include')}/Python.h")
    assert "Python.h) are missing [ZR653]" in said(triton_findings("cuda", headers))


def test_tritons_cache_must_be_writable(triton, tmp_path, monkeypatch):
    host = gcc(tmp_path)
    assert str(cache_folder(host)) == "/home/me/.triton/cache"
    assert str(cache_folder(gcc(tmp_path, TRITON_HOME="/t"))) == "/t/.triton/cache"
    assert str(cache_folder(gcc(tmp_path, TRITON_CACHE_DIR="/volume/t", TRITON_HOME="/t"))) == "/volume/t"
    (tmp_path / "home").mkdir()
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    monkeypatch.setattr(Host, "which", lambda host, name: name)
    assert "/home/me/.triton/cache cannot be written to" in said(triton_findings("cuda", host))
    assert asked == [tmp_path / "home"]  # the first that exists


def test_triton_is_expected_where_trl_takes_it():
    """On CUDA, with the package: kernels/chunked_logprob.py, `_use_triton`."""
    from transformers.utils import is_triton_available
    from trl.kernels.chunked_logprob import _use_triton

    for device in ("cpu", "cuda"):
        assert _use_triton(torch.device(device)) == (device == "cuda" and is_triton_available())


# DeepSpeed's quantizer


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_the_quantizer_is_built_and_needs_the_cuda_toolkit(settings, tmp_path, monkeypatch, key):  # noqa: F811
    monkeypatch.setattr("torch.version.cuda", "13.0")
    for stage, device, ops in ((3, "cuda", {"quantizer"}), (2, "cuda", set()), (3, "cpu", {"deepspeed_shm_comm"})):
        strategy = Strategy("z", 2, ds_config({"zero_optimization": {key: True}}, stage=stage), "c.json")
        assert ops_of(strategy, device, settings) == ops
    found = build(settings, machine(tmp_path), config={"zero_optimization": {"stage": 3, key: True}})
    assert "the CUDA toolkit 13.0 (nvcc) [ZR603]" in found


# the GPUs of a machine and the processes on it


def visible(monkeypatch, count, busy=""):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, busy))


def test_gpus_that_stay_idle_are_named_with_the_launch_that_takes_them(monkeypatch):
    visible(monkeypatch, 8)
    (finding,) = gpus.count_findings(Strategy("ddp", 2), "cuda", 2, {})
    assert (finding.code, finding.level) == ("ZR354", "warning")
    assert "6 of 8 GPUs stay idle: 2 processes" in finding.what and "--num_processes 8 " in finding.fix
    (finding,) = gpus.count_findings(Strategy("ddp", 4), "cuda", 2, {})  # two machines
    assert "--num_processes 16 " in finding.fix
    for here, device, environment in ((8, "cuda", {}), (2, "cpu", {}), (2, "cuda", {"CUDA_VISIBLE_DEVICES": "0,1"})):
        assert list(gpus.count_findings(Strategy("ddp", here), device, here, environment)) == []
    visible(monkeypatch, 8, "70000\n70000\n70000\n70000\n70000\n70000\n3\n3\n")
    assert list(gpus.count_findings(Strategy("ddp", 2), "cuda", 2, {})) == []  # others train on the rest


def test_quantized_gradients_need_a_process_for_each_gpu_of_a_machine(monkeypatch):
    """Held against DeepSpeed's own groups: none, groups that span machines, or an assertion."""
    from deepspeed.utils import groups

    strategy = Strategy("z", 8, ds_config({"zero_optimization": {"zero_quantized_gradients": True}}, stage=3), "c.json")
    made = []
    monkeypatch.setattr(groups, "_ALL_TO_ALL_GROUP", {})
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda *_: 8)
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks: made.append(ranks))
    for here, count, found in ((4, 4, []), (4, 8, ["ZR268"]), (2, 4, ["ZR268"]), (4, 6, ["ZR268"])):
        visible(monkeypatch, count)
        findings = list(gpus.count_findings(strategy, "cuda", here, {"CUDA_VISIBLE_DEVICES": "all of them"}))
        assert [finding.code for finding in findings] == found
        monkeypatch.setattr(groups, "get_accelerator", lambda count=count: machine_of(count))
        made.clear()
        try:
            groups._get_local_all_to_all_group()
            local = sum(ranks == list(range(first, first + here)) for ranks in made for first in range(0, 8, here))
        except AssertionError:
            local = 0
        assert (local == 8 // here) == (found == [])
    visible(monkeypatch, 8)
    one_machine = Strategy("z", 4, strategy.ds_config, "c.json")
    assert [f.code for f in gpus.count_findings(one_machine, "cuda", 4, {})] == ["ZR354"]  # nothing is quantized there


def machine_of(count):
    return type("Accelerator", (), {"device_count": staticmethod(lambda: count)})


# locked memory

LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {0}                {0}                bytes\n"


def test_how_much_a_process_may_lock(tmp_path):
    def may(limit, capabilities):
        status = f"Name:\tpython\nCapInh:\t0000000000000000\nCapEff:\t{capabilities}\n"
        return machine(tmp_path, {"/proc/self/limits": LIMITS.format(limit), "/proc/self/status": status}).lockable()

    assert may("65536", "00000000a80425fb") == 65536  # Docker's own, even for root
    assert may("65536", "00000000a80465fb") == math.inf  # --cap-add IPC_LOCK
    assert may("unlimited", "0000000000000000") == math.inf
    assert Host().lockable() in (math.inf, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])  # as this machine writes it


def test_swap_buffers_that_may_not_be_locked_are_refused(settings, tmp_path):  # noqa: F811
    (tmp_path / "disk").mkdir()
    block = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "buffer_size": 5_000_000, "buffer_count": 5}
    run = run_of(settings, stage=3)
    both = {"offload_param": block, "offload_optimizer": {"device": "nvme", "nvme_path": block["nvme_path"]}}
    for zero, needed in (({"offload_param": block}, 50_000_000), (both, 50_000_000 + 4 * 4 * 2_500_000)):
        strategy = Strategy("z", 2, ds_config({"zero_optimization": zero}, stage=3), "c.json")
        swapping = run.__class__(None, run.settings, {}, strategy, "cuda", run.output_dir)
        for limit, codes in ((needed - 1, ["ZR655"]), (needed, [])):
            host = machine(tmp_path, {"/proc/self/limits": LIMITS.format(limit), "/proc/self/status": "CapEff:\t0\n"})
            findings = list(nvme_findings(swapping, [10**7], 2, host))
            errors = [f for f in findings if f.level == "error"]
            assert [f.code for f in errors] == codes and all("memlock=-1" in f.fix for f in errors)


# InfiniBand


def test_infiniband_that_a_container_only_sees_is_named(tmp_path, monkeypatch):
    """Warnings in the order in which they are cured: the device's file, the library, locked memory."""
    monkeypatch.setattr(infiniband, "has_libibverbs", lambda: False)
    shown = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA", "/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0\n"}

    def found(host, several=True, device="cuda", **environment):
        return said(infiniband.infiniband_findings(device, several, environment, host))

    closed = machine(tmp_path, shown)
    assert found(closed).startswith("warning: this machine has InfiniBand or RoCE (mlx5_0), and this user")
    assert found(machine(tmp_path / "none")) == found(closed, several=False) == found(closed, device="cpu") == ""
    assert found(closed, NCCL_IB_DISABLE="1") == found(closed, NCCL_NET="Socket") == ""
    little = {"/proc/self/limits": LIMITS.format(8_388_608), "/proc/self/status": "CapEff:\t0\n"}
    opened = machine(tmp_path, shown | {"/dev/infiniband/uverbs3": ""} | little)
    assert "libibverbs.so.1 is not found" in found(opened)
    monkeypatch.setattr(infiniband, "has_libibverbs", lambda: True)
    assert found(opened) == ("warning: InfiniBand or RoCE (mlx5_0), and each process may lock 8.39 MB [ZR658]")
    assert found(machine(tmp_path, {"/proc/self/limits": LIMITS.format("unlimited")})) == ""
    for flag in ("--device /dev/infiniband", "--cap-add IPC_LOCK", "--ulimit memlock=-1", "--network host"):
        assert flag in infiniband.FLAGS


def test_the_network_is_measured_with_more_bytes_on_gpus():
    from zero_recipes.distributed.links import ALL_REDUCE_BYTES

    assert ALL_REDUCE_BYTES["cuda"] == 256 * 2**20 > ALL_REDUCE_BYTES["cpu"]
