"""The machine under a run, as a fake root shows it: each bad machine is found, its fixed twin passes.

No GPU is needed: the driver, the cards and the network are files and numbers here.
"""

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
import sysconfig
from contextlib import closing
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import datasets
import deepspeed
import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as draw
from torch.utils.cpp_extension import _get_build_directory

from tests.helpers import fake_cuda
from tests.helpers.faults import Side
from tests.helpers.tiny import write_recipe
from zero_recipes.checks import machine as machines
from zero_recipes.checks.capacity import disk_findings, memory_findings, nvme_findings
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy
from zero_recipes.core import units
from zero_recipes.core.findings import Finding, Refusal, print_ending
from zero_recipes.core.host import PINNED_LIMIT_MIB, Host, pinned_bytes, set_allocator
from zero_recipes.engine.group import set_host_threads
from zero_recipes.engine.kernels import build_findings, extension_folder
from zero_recipes.model import load_config
from zero_recipes.tools import env
from zero_recipes.tools import main as cli

GB = 10**9
PSI = 7 * GB  # parameters
CONFIG = SimpleNamespace(dtype=torch.float16)
ADAM = {"optimizer": {"type": "AdamW", "params": {}}}
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
PYTHON_H = f"{sysconfig.get_path('include')}/Python.h"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The keys of a recipe in force: full fine-tuning in bf16 that saves a model and no checkpoints."""
    path = write_recipe(tmp_path_factory.mktemp("machine"), save_model=True, random_weights=False)
    return recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings


def ds_config(config: dict, offload: str | None = None, stage: int = 2) -> DsConfig:
    zero = {"stage": stage} | ({} if offload is None else {"offload_optimizer": {"device": offload}})
    return DsConfig(config | {"zero_optimization": zero | config.get("zero_optimization", {})})


def run_of(settings, device="cuda", stage=2, world=2, output_dir="out", offload=None, **changes) -> Run:
    name = "ddp" if stage is None else f"zero{stage}"
    config = None if stage is None else ds_config({}, offload, stage)
    strategy = Strategy(name, world, config, "c.json")
    return Run(None, settings.replace(output_dir=str(output_dir), **changes), {}, strategy, device, {})


def machine(root: Path, files: dict[str, str] | None = None, free: int = 10**15, lacks: str = "", **variables) -> Host:
    """A root with these files (programs where the path is in bin/), `free` bytes on every disk, and a sound base less
    what it `lacks`."""
    base = {
        "/proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n",
        "/usr/bin/c++": "#!/bin/sh\n",
        PYTHON_H: "",
        "/usr/include/libaio.h": "",
    }
    for name, text in (base | (files or {})).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    if lacks:
        (root / lacks.lstrip("/")).unlink()
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    variables = {"PATH": str(root / "usr/bin"), "TORCH_EXTENSIONS_DIR": "/extensions"} | variables
    return Host(root, variables, lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))


def said(findings) -> str:
    findings = list(findings)
    assert all(f.what and f.why and f.fix for f in findings)
    return " | ".join(f"{f.level}: {f.what} [{f.code}]" for f in findings)


# memory and cores

IN_A_POD = {"/proc/self/cgroup": "0::/kubepods/pod1/c\n"}
POD = "/sys/fs/cgroup/kubepods/pod1"
CONTAINER = {"/proc/self/cgroup": "0::/\n"}


LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {0}                {0}                bytes\n"


def may_lock(limit: int | str, capabilities: str = "0") -> dict[str, str]:
    return {"/proc/self/limits": LIMITS.format(limit), "/proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"}


@pytest.mark.parametrize(
    "files, memory, cores, lockable",
    [
        ({}, 1_024_000_000, 64, math.inf),
        (may_lock(65536, "00000000a80425fb"), 1_024_000_000, 64, 65536),  # Docker's own, even for root
        (may_lock(65536, "00000000a80465fb"), 1_024_000_000, 64, math.inf),  # --cap-add IPC_LOCK
        (may_lock("unlimited"), 1_024_000_000, 64, math.inf),
        ({"/proc/meminfo": "MemAvailable: 1000000 kB\nSwapFree: 500000 kB\n"}, 1_536_000_000, 64, math.inf),
        (IN_A_POD | {f"{POD}/c/memory.max": "max\n", f"{POD}/memory.max": "500000000\n"}
         | {f"{POD}/c/cpu.max": "max 100000\n", f"{POD}/cpu.max": "1250000 100000\n"}, 500_000_000, 12, math.inf),
        (CONTAINER | {"/sys/fs/cgroup/memory.max": "400000000\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"},
         400_000_000, 1, math.inf),
    ],
)  # fmt: skip
def test_what_a_process_may_take_is_the_least_of_the_host_and_its_cgroups(
    tmp_path, monkeypatch, files, memory, cores, lockable
):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    host = machine(tmp_path, files)
    assert (host.memory()[0], host.cores(), host.lockable()) == (memory, cores, lockable)


@pytest.mark.parametrize(
    "run, needs",
    [
        (dict(stage=2, offload="cpu"), 12 * 7),  # the optimizer of both processes
        (dict(stage=2, offload="cpu", dtype="bfloat16", random_weights=True, world=16), 32 * 7),  # 16 x 2Ψ: loading
        (dict(stage=None), 2 * 4 * 7),  # float32 made of a float16 file, in both processes
        (dict(stage=None, dtype="float16"), 0),  # the file itself is mapped
        (dict(stage=3), 0),
        (dict(stage=1, device="cpu"), (12 + 4 + 4) * 7),  # parameters and gradients whole in both processes
        (dict(stage=3, device="cpu"), 16 * 7),
        (dict(stage=2, device="cpu", use_peft=True), 2 * 2 * 7),
        (dict(stage=3, device="cpu", offload="nvme"), 4 * 7),
    ],
)
def test_host_memory_that_a_run_certainly_needs(settings, tmp_path, run, needs):
    run = run_of(settings, **run)
    kib = int(needs * GB / 1024)
    for spare, found in ((-10, needs > 0), (10, False)):
        host = machine(tmp_path, {"/proc/meminfo": f"MemAvailable: {max(kib + spare, 0)} kB\n"})
        findings = list(memory_findings(run, CONFIG, PSI, run.strategy.world_size, host))
        assert [finding.level for finding in findings] == ["error"] * found
        assert not found or f"at least {units.size(needs * GB)} of host memory" in said(findings)


# disk

SAVES = dict(save_strategy="steps", max_steps=100, save_steps=50)


@pytest.mark.parametrize(
    "changes, gigabytes",
    [
        (dict(), 2 * 7),  # the model alone
        (dict(save_model=False), 0),
        (SAVES, 2 * 16 * 7 + 14),
        (SAVES | dict(save_total_limit=1), 2 * 16 * 7 + 14),  # the newest is written before the oldest is deleted
        (SAVES | dict(save_steps=10), 10 * 16 * 7 + 14),
        (SAVES | dict(save_only_model=True, stage=3), 2 * 14 + 14),
        (SAVES | dict(stage=3), 2 * 14 * 7 + 14),
        (SAVES | dict(stage=None), 2 * 12 * 7 + 4 * 7),
        (SAVES | dict(use_peft=True), 0),
    ],
)
def test_disk_for_checkpoints_and_the_model(settings, tmp_path, changes, gigabytes):
    """What goes before counts as room."""
    run, free = run_of(settings, output_dir=tmp_path / "out", **changes), gigabytes * GB
    assert said(disk_findings(run, CONFIG, PSI, 2, machine(tmp_path / "r", free=free))) == ""
    if gigabytes:
        host = machine(tmp_path / "r", free=free - 1)
        assert f"at least {units.size(free)}, but" in said(disk_findings(run, CONFIG, PSI, 2, host))
        (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
        (tmp_path / "out" / "checkpoint-1" / "model.safetensors").write_bytes(b"0")
        assert said(disk_findings(run, CONFIG, PSI, 2, host)) == ""


def nvcc(release: str) -> str:
    return f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n"


CXX, AIO = "/usr/bin/c++", "/usr/include/libaio.h"


def compiled(*ops: str) -> dict[str, str]:
    rules = {f"/extensions/{op}/build.ninja": f"compile {deepspeed.__path__[0]}/ops/csrc" for op in ops}
    return rules | {f"/extensions/{op}/{op}.so": "" for op in ops}


COMPILED = compiled("deepspeed_shm_comm", "async_io")


@pytest.mark.parametrize(
    "device, config, offload, host, found",
    [
        ("cpu", {}, None, dict(lacks=CXX), "lacks a C++ compiler (c++) [ZR603]"),
        ("cuda", {}, None, dict(lacks=CXX), ""),  # nothing is built
        ("cpu", {}, None, dict(lacks=CXX, files={"/usr/bin/clang++": ""}, CXX="clang++"), ""),
        ("cpu", {}, None, dict(lacks=CXX, files=COMPILED), ""),  # compiled before
        ("cpu", {}, "cpu", dict(lacks=CXX, files=COMPILED), "cannot compile cpu_adam because"),
        ("cpu", {}, None, dict(lacks=PYTHON_H), "Python.h"),
        ("cpu", NVME, "nvme", dict(), ""),
        ("cpu", NVME, "nvme", dict(lacks=AIO), "lacks libaio.h"),
        ("cpu", NVME, "nvme", dict(lacks=AIO, files=COMPILED), "lacks libaio.h"),  # async_io loads pin_memory first
        ("cpu", NVME, "nvme", dict(lacks=AIO, files=COMPILED | compiled("pin_memory")), ""),
        ("cpu", NVME, "nvme", dict(lacks=AIO, files={"/opt/aio/libaio.h": ""}, CFLAGS="-O2 -I/opt/aio"), ""),
        ("cuda", ADAM, None, dict(), "lacks the CUDA toolkit 13.0 (nvcc) [ZR603]"),
        ("cuda", {}, "cpu", dict(), ""),  # cpu_adam is plain C++ on a GPU machine too
        ("cuda", {"zero_force_ds_cpu_optimizer": False}, "cpu", dict(lacks=CXX), ""),
        ("cuda", {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None, dict(), ""),
        ("cuda", {"optimizer": {"type": "Lion"}}, None, dict(), "cannot compile fused_lion"),
        ("cuda", {"optimizer": {"type": "SGD"}}, None, dict(), ""),
        ("cuda", NVME, "nvme", dict(lacks=CXX), "cannot compile async_io, cpu_adam"),
        ("cuda", ADAM, None, dict(files={"/usr/bin/nvcc": nvcc("12.4")}), "torch was built with CUDA 13.0 [ZR607]"),
        ("cuda", ADAM, None, dict(files={"/usr/local/cuda/bin/nvcc": nvcc("13.1")}), ""),
    ],
)
def test_what_is_missing_to_build_the_ops(settings, tmp_path, monkeypatch, device, config, offload, host, found):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    strategy = Strategy("zero2", 2, ds_config(config, offload), "c.json")
    text = said(build_findings(strategy, device, settings, machine(tmp_path, **host)))
    assert found in text and bool(found) == bool(text)


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_the_folder_of_an_extension_is_torchs(monkeypatch, tmp_path, cuda):
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(extension_folder(os.environ, "some_op")) == _get_build_directory("some_op", False)


@pytest.fixture
def online(monkeypatch):
    """As on a machine that may ask the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


def test_a_silent_hub_is_asked_once_and_then_left_alone(tmp_path, online, monkeypatch, capsys):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # takes connections, and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(machines, "PROBE_SECONDS", 0.2)
        Side(recipe="model_name_or_path: nobody/has-this\nrandom_weights: true").write(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert cli.main(["check", "recipe.yaml"]) == 2
        assert os.environ["HF_HUB_OFFLINE"] == "1" and datasets.config.HF_HUB_OFFLINE
        text = capsys.readouterr().out
        assert text.count("[ZR430]") == 1 and text.count("[ZR403]") == 1


def test_cards_without_bf16_are_refused(monkeypatch):
    found = [((8, 0), "A100"), ((7, 5), "Tesla T4"), ((7, 0), "V100")]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(found))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda number: found[number][0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: found[number][1])
    codes = {precision: [f.code for f in machines.card_findings(precision)] for precision in ("bf16", "fp16")}
    assert codes == {"bf16": ["ZR272", "ZR272"], "fp16": []}
    assert "GPU 1 (Tesla T4), which has compute capability 7.5" in said(machines.card_findings("bf16"))


QGZ = ds_config({"zero_optimization": {"zero_quantized_gradients": True}}, stage=3)


@pytest.mark.parametrize(
    "strategy, here, gpus, variables, codes",
    [
        (Strategy("ddp", 2), 2, 8, {}, ["ZR354"]),
        (Strategy("ddp", 8), 8, 8, {}, []),
        (Strategy("ddp", 2), 2, 8, {"CUDA_VISIBLE_DEVICES": "0,1"}, []),
        (Strategy("z", 8, QGZ, "c.json"), 4, 4, {"CUDA_VISIBLE_DEVICES": "all"}, []),
        (Strategy("z", 8, QGZ, "c.json"), 4, 8, {"CUDA_VISIBLE_DEVICES": "all"}, ["ZR268"]),
        (Strategy("z", 4, QGZ, "c.json"), 4, 8, {}, ["ZR354"]),  # nothing is quantized on one machine
    ],
)
def test_gpus_that_no_process_takes(monkeypatch, strategy, here, gpus, variables, codes):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = list(machines.count_findings(strategy, here, variables))
    assert [finding.code for finding in found] == codes
    assert all("--num_processes 8 " in finding.fix for finding in found if strategy.name == "ddp")


MODULE = "NVRM version: NVIDIA UNIX {}  {}  Release Build\nGCC version: gcc 12.2.0\n"
CLOSED, OPEN = "x86_64 Kernel Module", "Open Kernel Module for x86_64"
DRIVER = {"/proc/driver/nvidia/version": MODULE.format(CLOSED, "550.54.15"), "/dev/nvidia0": ""}


@pytest.mark.parametrize(
    "files, variables, use_cpu, built, available, found",
    [
        (DRIVER, {}, False, "13.0", False, "driver 550.54.15, /dev/nvidia0"),
        ({"/proc/driver/nvidia/version": MODULE.format(OPEN, "570.86.15")}, {}, False, "13.0", False, "570.86.15"),
        (DRIVER, {}, True, "13.0", False, None),
        (DRIVER, {"CUDA_VISIBLE_DEVICES": "-1"}, False, "13.0", False, None),
        ({"/dev/nvidiactl": "", "/dev/nvidia-uvm": ""}, {}, False, "13.0", False, None),  # a laptop
        (DRIVER, {}, False, None, False, None),
        (DRIVER, {}, False, "13.0", True, None),
    ],
)
def test_an_unusable_gpu_is_refused(tmp_path, monkeypatch, files, variables, use_cpu, built, available, found):
    """Where the CPU is not meant."""
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    findings = list(machines.driver_findings(use_cpu, machine(tmp_path, files, **variables), lambda: "too old"))
    assert [(f.code, f.scope) for f in findings] == ([("ZR650", "machine")] if found else [])
    assert all(found in f.what and "too old" in f.why and "driver 580" in f.why for f in findings)


GCC = {"/usr/bin/gcc": "#!/bin/sh\n"}


@pytest.mark.parametrize(
    "device, host, found",
    [
        ("cuda", dict(files=GCC), ""),
        ("cuda", dict(), "lacks the C compiler gcc or clang [ZR652]"),  # c++ is there, which Triton does not call
        ("cpu", dict(), ""),
        ("cuda", dict(files={"/usr/bin/clang": ""}), ""),
        ("cuda", dict(files=GCC, CC="icx -O2"), "compiler icx -O2 "),
        ("cuda", dict(files=GCC, lacks=PYTHON_H), "lacks Python's headers (Python.h) [ZR652]"),
        ("cuda", dict(files=GCC, TRITON_CACHE_DIR="/closed/cache"), "lacks the right to write to /closed/cache"),
    ],
)
def test_triton_needs_a_compiler_headers_and_a_cache(tmp_path, monkeypatch, device, host, found):
    monkeypatch.setattr("transformers.utils.is_triton_available", lambda: True)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")  # root may write everywhere
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Host, "which", lambda host, name: (host.root / "usr" / "bin" / name).exists())
    text = said(machines.triton_findings(device, machine(tmp_path, **({"HOME": "/home/me"} | host))))
    assert found in text and bool(found) == bool(text)


def test_swap_buffers_that_may_not_be_locked_are_refused(settings, tmp_path):
    (tmp_path / "disk").mkdir()
    block = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "buffer_size": 5_000_000, "buffer_count": 5}
    run = run_of(settings, stage=3)
    both = {"offload_param": block, "offload_optimizer": {"device": "nvme", "nvme_path": block["nvme_path"]}}
    for zero, needed in (({"offload_param": block}, 50_000_000), (both, 50_000_000 + 4 * 4 * 2_500_000)):
        strategy = Strategy("z", 2, ds_config({"zero_optimization": zero}, stage=3), "c.json")
        swapping = dataclasses.replace(run, strategy=strategy)
        for limit, codes in ((needed - 1, ["ZR655"]), (needed, [])):
            findings = list(nvme_findings(swapping, [10**7], 2, machine(tmp_path, may_lock(limit))))
            assert [f.code for f in findings if f.level == "error"] == codes


SEEN = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA", "/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0\n"}
OPENED = SEEN | {"/dev/infiniband/uverbs3": ""}


@pytest.mark.parametrize(
    "files, variables, found",
    [
        ({}, {}, ""),
        (SEEN, {}, "(mlx5_0), but this user or container cannot open /dev/infiniband/uverbs*"),
        (SEEN, {"NCCL_IB_DISABLE": "1"}, ""),
        (OPENED, {}, ""),
    ],
)
def test_infiniband_that_a_container_only_sees_is_named(tmp_path, files, variables, found):
    host = machine(tmp_path, files)
    text = said(machines.infiniband_findings("cuda", True, variables, host))
    assert found in text and bool(found) == text.startswith("warning")
    assert said(machines.infiniband_findings("cuda", False, variables, host)) == ""


def test_one_bad_machine_refuses_a_run_and_only_warns_where_a_run_elsewhere_is_checked(settings, tmp_path):
    run, config = run_of(settings, device="cpu", output_dir=tmp_path), load_config(settings)
    for rehearsal, level in ((False, "error"), ("here", "error"), ("elsewhere", "warning")):
        (finding,) = machines.machine_findings(run, config, {}, machine(tmp_path, lacks=CXX), rehearsal)
        assert (finding.level, finding.scope) == (level, "machine")
        assert finding.what.startswith("on this machine") == (rehearsal == "elsewhere")
    assert machines.machine_findings(run, config, {}, machine(tmp_path / "fixed"), False) == []


def test_check_refuses_a_machine_that_the_recipe_means(tmp_path, monkeypatch, capsys):
    """The verb itself: a machine without a compiler, and one whose GPU torch cannot use."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipe = write_recipe(tmp_path, deepspeed="ds_configs/zero2.json")
    argv = ["check", str(recipe), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    assert cli.main([*argv, "true"]) == 2
    assert "refused: DeepSpeed cannot compile" in capsys.readouterr().out
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machines, "driver_version", lambda host: "550.54.15")
    assert cli.main([*argv, "false"]) == 2
    assert "[ZR650]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "keys", "codes"),
    [
        ("h100-80gb", {"bf16": False, "fp16": True, "tf32": True, "attn_implementation": "flash_attention_2"}, []),
        ("t4", {"bf16": False, "fp16": True, "tf32": True, "attn_implementation": "flash_attention_2"}, ["ZR870"]),
        ("t4", {"bf16": True}, ["ZR870"]),
    ],
)
def test_check_judges_for_a_card_that_is_not_here(tmp_path, capsys, gpu, keys, codes):
    recipe = write_recipe(tmp_path, deepspeed="ds_configs/zero2.json", skip_plan=True, **keys)
    argv = ["check", str(recipe), "--num_processes", "2", "--output_dir", str(tmp_path / "out")]
    assert cli.main([*argv, "--gpu", gpu]) == (2 if codes else 0)
    said = capsys.readouterr().out
    assert re.findall(r"\[(ZR\d+)\]$", said, re.MULTILINE) == codes and "world size    2 on cuda" in said
    launch = f"zero-recipes train {recipe} --num_processes 2 --output_dir {tmp_path / 'out'}"
    assert (said.splitlines()[-1] == launch) == (not codes)


def test_each_finding_is_said_by_the_ranks_of_its_scope(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    findings = [Finding("ZR000", scope, f"w {scope}", "c", scope=scope) for scope in ("run", "machine", "rank")]
    for rank, local_rank, says in ((0, 0, ["run", "machine", "rank"]), (8, 0, ["machine", "rank"]), (9, 1, ["rank"])):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert print_ending(Refusal(findings)) == 2
        heard = [line.removeprefix("refused: ") for line in capsys.readouterr().err.splitlines() if "refused" in line]
        assert heard == [f"{scope} [ZR000]" for scope in says]


def test_results_outside_of_a_pods_volume_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    pod = machine(tmp_path, RUNPOD_POD_ID="x")
    assert "[ZR615]" in said(machines.volume_findings(Path("out"), pod))
    for path, host in (("/workspace/out", pod), ("out", machine(tmp_path))):
        assert said(machines.volume_findings(Path(path), host)) == ""


def test_env_shows_a_pod_as_its_container_may_use_it(tmp_path, monkeypatch):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "")
    files = DRIVER | CONTAINER | SEEN | may_lock(8388608)
    files |= {"/sys/fs/cgroup/memory.max": "500000000\n", "/sys/fs/cgroup/cpu.max": "100000 100000\n"}
    pod = machine(tmp_path, files, 7 * GB, NCCL_DEBUG="INFO", UNRELATED="x", HF_TOKEN="hf_abc", WANDB_API_KEY="w")
    found = env.machine(pod)
    (gpu,) = found["gpus"]
    assert gpu["memory"] == units.size(80 * fake_cuda.GIB)
    assert (found["memory"]["free"], found["memory"]["lockable"]) == ("500 MB", units.size(8 << 20))
    assert found["cpu"]["cores"] == 1 and found["infiniband"] == {"mlx5_0": False}
    assert {disk["free"] for disk in found["disks"]} == {units.size(7 * GB)}
    assert found["variables"]["NCCL_DEBUG"] == "INFO" and "UNRELATED" not in found["variables"]
    whole = json.dumps(found)
    assert "hf_abc" not in whole and "WANDB" not in whole and found["variables"]["HF_TOKEN"] == "(set, not shown)"
    assert found["cuda"]["driver"] == "550.54.15"
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "too old")
    assert (env.machine(pod)["gpus"], env.machine(pod)["cuda"]["refusal"]) == ([], "too old")


def test_env_prints_a_page(capsys):
    assert cli.main(["env"]) == 0
    text, found = capsys.readouterr().out, env.machine(Host())
    assert found["cpu"]["name"] in text and found["memory"]["machine"] in text


def test_env_shows_the_versions_of_a_checkout_that_is_not_installed(monkeypatch, capsys):
    installed = Distribution.from_name

    def from_name(name):
        if name == "zero-recipes":
            raise PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(Distribution, "from_name", from_name)
    assert cli.main(["env"]) == 0
    versions = yaml.safe_load(capsys.readouterr().out)["versions"]
    assert versions["zero-recipes"] == "not installed" and versions["torch"] == version("torch")


# memory and cores for an optimizer on the CPU

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
def test_only_what_the_limit_allows_is_rounded(size, mib):
    taken = pinned_bytes(size, {"PYTORCH_CUDA_ALLOC_CONF": f"x:1,pinned_max_cached_size_mb:{mib}"})
    if size > mib << 20:
        assert taken == size
    else:
        assert size <= taken < 2 * size and taken & (taken - 1) == 0
    assert pinned_bytes(47_384_000_000, {}) == 47_384_000_000  # Pythia-12B in fp32, by the limit that a run sets


@pytest.mark.parametrize(
    ("written", "in_force"),
    [("", BOTH), ("env:\n  PYTORCH_ALLOC_CONF: expandable_segments:False\n", f"expandable_segments:False,{SET}")],
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
