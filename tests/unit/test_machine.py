"""The machine under a run, as a fake root shows it: each bad machine is found, its fixed twin passes.

No GPU is needed: the driver, the cards and the network are files and numbers here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
from deepspeed import git_version_info
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from tests.helpers.compiled import write_compiled
from tests.helpers.faults import Side
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checks import cache
from zero_recipes.checks import machine as machines
from zero_recipes.checks.capacity import (
    disk_findings,
    download_findings,
    memory_findings,
    nvme_findings,
    resume_findings,
    shared_memory_findings,
)
from zero_recipes.checks.lower_bounds import host_terms
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.run import RunConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core import units
from zero_recipes.core.findings import Finding, Refusal, print_refusal
from zero_recipes.core.host import Host
from zero_recipes.distributed.kernels import build_findings, extension_folder, is_compiled, ops_of
from zero_recipes.model import local_config, parameter_sizes

GB = 10**9
PSI = 7 * GB  # parameters
CONFIG = SimpleNamespace(dtype=torch.float16)
ADAM = {"optimizer": {"type": "AdamW", "params": {}}}
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The keys of a recipe in force: full fine-tuning in bf16 that saves a model and no checkpoints."""
    path = write_recipe(tmp_path_factory.mktemp("machine"), save_model=True, random_weights=False)
    return recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings


def ds_config(config: dict, offload: str | None = None, stage: int = 2) -> DsConfig:
    zero = {"stage": stage} | ({} if offload is None else {"offload_optimizer": {"device": offload}})
    return DsConfig(config | {"zero_optimization": zero | config.get("zero_optimization", {})})


def run_of(settings, device="cuda", stage=2, world=2, output_dir="out", offload=None, **changes) -> RunConfig:
    name = "ddp" if stage is None else f"zero{stage}"
    config = None if stage is None else ds_config({}, offload, stage)
    strategy = Strategy(name, world, config, "c.json")
    return RunConfig(None, settings.replace(**changes), {}, strategy, device, Path(output_dir))


def machine(root: Path, files: dict[str, str] | None = None, free: int = 10**15, **environment: str) -> Host:
    """A root with these files (programs where the path is in bin/), `free` bytes on every disk, and a sound base."""
    base = {
        "/proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n",
        "/usr/bin/c++": "#!/bin/sh\n",
        f"{sysconfig.get_path('include')}/Python.h": "",
        "/usr/include/libaio.h": "",
    }
    for name, text in (base | (files or {})).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    variables = {"PATH": str(root / "usr/bin"), "TORCH_EXTENSIONS_DIR": "/extensions"} | environment
    return Host(root, variables, lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))


def without(host: Host, name: str) -> Host:
    (host.root / name.lstrip("/")).unlink()
    return host


def said(findings) -> str:
    findings = list(findings)
    assert all(f.what and f.why and f.fix for f in findings)
    return " | ".join(f"{f.level}: {f.what} [{f.code}]" for f in findings)


# memory


def test_memory_is_the_least_of_meminfo_and_the_cgroups(tmp_path):
    assert machine(tmp_path / "bare").memory() == (1_024_000_000, "MemAvailable in /proc/meminfo")
    swap = {"/proc/meminfo": "MemAvailable: 1000000 kB\nSwapFree: 500000 kB\n"}
    assert machine(tmp_path / "swap", swap).memory()[0] == 1_536_000_000
    two = {
        "/proc/self/cgroup": "0::/kubepods/pod1/c\n",
        "/sys/fs/cgroup/kubepods/pod1/c/memory.max": "max\n",
        "/sys/fs/cgroup/kubepods/pod1/memory.max": "500000000\n",  # the pod's limit holds for its containers
    }
    assert machine(tmp_path / "v2", two).memory() == (500_000_000, "the cgroup's memory.max")
    own = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "400000000\n"}
    assert machine(tmp_path / "namespace", own).memory()[0] == 400_000_000
    one = {
        "/proc/self/cgroup": "9:cpu:/\n4:cpuacct,memory:/docker/abc\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "300000000\n",  # Docker shows the container's folder as the root
    }
    assert machine(tmp_path / "v1", one).memory() == (300_000_000, "the cgroup's memory.limit_in_bytes")


def test_a_checkpoint_that_the_host_cannot_read_is_said_before_it_is_read(settings, tmp_path):
    step = tmp_path / "checkpoint-5" / "global_step5"
    step.mkdir(parents=True)
    for name, size in (("mp_rank_00_model_states.pt", 300), ("zero_pp_rank_0_mp_rank_00_optim_states.pt", 700)):
        with open(step / name, "wb") as file:
            file.truncate(size * 1000)
    run = run_of(settings, resume_from_checkpoint=str(step.parent))
    small = machine(tmp_path / "small", {"/proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 1000 kB\n"})
    (finding,) = resume_findings(run, 2, small)  # two processes read 700,000 bytes each
    assert finding.code == "ZR641" and "1.40 MB" in finding.what
    assert list(resume_findings(run, 1, small)) == []
    assert list(resume_findings(run_of(settings, resume_from_checkpoint=None), 2, small)) == []


def test_cores_are_the_least_of_those_allowed_and_the_quotas(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    assert machine(tmp_path / "bare").cores() == 64
    two = {
        "/proc/self/cgroup": "0::/kubepods/pod1/c\n",
        "/sys/fs/cgroup/kubepods/pod1/c/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/kubepods/pod1/cpu.max": "1250000 100000\n",
    }
    assert machine(tmp_path / "v2", two).cores() == 12
    one = {
        "/proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert machine(tmp_path / "v1", one).cores() == 1
    free = one | {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}
    assert machine(tmp_path / "free", free).cores() == 64


@pytest.mark.parametrize(
    "run, needs",
    [
        # the optimizer of both processes, 12Ψ in all, fp32 gradients, and 16-bit weights on their way back
        (dict(stage=2, offload="cpu", gradient_accumulation_steps=1), (12 + 4 + 2) * 7),
        (dict(stage=2, offload="cpu", gradient_accumulation_steps=2), (12 + 4 + 2 + 2) * 7),  # gradients of two passes
        (dict(stage=3, offload="cpu"), (12 + 4 + 2) * 7),
        (dict(stage=2, offload="cpu", dtype="bfloat16", random_weights=True, world=16), 32 * 7),  # 16 x 2Ψ: loading
        (dict(stage=None), 2 * 4 * 7),  # float32 made of a float16 file, in both processes
        (dict(stage=None, dtype="float16"), 0),  # the file itself is mapped
        (dict(stage=3), 0),
        (dict(stage=1, device="cpu"), (12 + 4 + 4) * 7),  # parameters and gradients whole in both processes
        (dict(stage=3, device="cpu"), 16 * 7),
        (dict(stage=2, device="cpu", use_peft=True), 2 * 2 * 7),
        (
            dict(stage=3, device="cpu", offload="nvme"),
            4 * 7 + 32,
        ),  # and four fp32 buffers of 10⁹ elements in each process,
    ],
)
def test_host_memory_that_a_run_certainly_needs(settings, tmp_path, run, needs):
    run = run_of(settings, **run)
    here = run.strategy.world_size
    kib = int(needs * GB / 1024)
    for spare, found in ((-10, needs > 0), (10, False)):
        host = machine(tmp_path, {"/proc/meminfo": f"MemAvailable: {max(kib + spare, 0)} kB\n"})
        findings = list(memory_findings(run, CONFIG, PSI, here, host))
        assert bool(findings) == found
        if found:
            assert f"at least {units.size(needs * GB)} of host memory" in said(findings)
            assert findings[0].level == "error"


def test_parameters_are_counted_without_weights_and_tied_ones_once(settings):
    config = local_config(settings)
    count = sum(parameter_sizes(config, False))
    with_weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert count == with_weights
    assert local_config(settings.replace(**{"model_name_or_path": "nobody/nothing"})) is None
    assert parameter_sizes(SimpleNamespace(), False) is None


def test_swap_buffers_take_host_memory_on_a_gpu_machine_too(settings):
    """2 bytes x 5 x 10⁸ for parameters, 4 bytes x 4 x 10⁸ for the optimizer; a sub-group no larger than the model."""
    zero = {"stage": 3, "sub_group_size": 10**8}
    zero["offload_param"] = {"device": "nvme", "buffer_size": 10**8, "buffer_count": 5}
    zero["offload_optimizer"] = {"device": "nvme"}
    strategy = Strategy("zero3_infinity", 2, DsConfig({"zero_optimization": zero}), "c.json")
    assert sum(host_terms(strategy, "cuda", settings, CONFIG, PSI, 2).values()) == 2 * 2_600_000_000
    assert sum(host_terms(strategy, "cuda", settings, CONFIG, 10**6, 2).values()) == 2 * (1_000_000_000 + 16 * 250_000)


# disk


def test_disk_for_checkpoints_and_the_model(settings, tmp_path):
    saves = dict(save_strategy="steps", max_steps=100, save_steps=50, output_dir=tmp_path)
    for changes, gigabytes in (
        (dict(), 2 * 7),  # the model alone
        (dict(save_model=False), 0),
        (saves, 2 * 16 * 7 + 14),
        (saves | dict(save_total_limit=1), 2 * 16 * 7 + 14),  # the newest is written before the oldest is deleted
        (saves | dict(save_steps=10, save_total_limit=2), 3 * 16 * 7 + 14),
        (saves | dict(save_steps=10), 10 * 16 * 7 + 14),
        (saves | dict(save_only_model=True, stage=3), 2 * 14 + 14),
        (saves | dict(stage=3), 2 * 14 * 7 + 14),
        (saves | dict(stage=None), 2 * 12 * 7 + 4 * 7),
        (saves | dict(use_peft=True), 0),
    ):
        run = run_of(settings, **changes)
        free = gigabytes * GB
        assert said(disk_findings(run, CONFIG, PSI, 2, machine(tmp_path / "r", free=free))) == ""
        if gigabytes:
            (finding,) = disk_findings(run, CONFIG, PSI, 2, machine(tmp_path / "r", free=free - 1))
            assert f"must take at least {units.size(gigabytes * GB)}, and" in finding.what


def test_checkpoints_that_will_go_count_as_room(settings, tmp_path):
    run = run_of(settings, output_dir=tmp_path / "out")
    host = machine(tmp_path / "root", free=14 * GB - 1000)
    assert said(disk_findings(run, CONFIG, PSI, 2, host))
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-1" / "model.safetensors").write_bytes(b"0" * 1000)
    assert said(disk_findings(run, CONFIG, PSI, 2, host)) == ""


def test_a_download_that_does_not_fit(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("zero_recipes.checks.capacity.missing_of_model", lambda settings: "weights")
    run = run_of(settings, model_name_or_path="o/m")
    for free, found in ((14 * GB - 1, True), (14 * GB, False)):
        host = machine(tmp_path, free=free)
        assert ("at least 14.0 GB" in said(download_findings(run, PSI, host))) == found


def test_shared_memory(settings, tmp_path):
    docker, larger = machine(tmp_path, free=64 * 2**20), machine(tmp_path, free=2**30)
    (finding,) = shared_memory_findings(run_of(settings), 2, docker)
    assert "67.1 MB free, and 2 processes here may need 1.00 GB" in finding.what
    assert (finding.code, finding.level) == ("ZR611", "warning") and "--shm-size" in finding.fix
    loaders = {"dataloader_num_workers": 8, "per_device_train_batch_size": 32, "max_length": 8192}
    on_cpu, loading = run_of(settings, "cpu"), run_of(settings, "cpu", **loaders)
    for run, here, host in ((run_of(settings), 2, larger), (run_of(settings), 1, docker), (on_cpu, 2, docker)):
        assert said(shared_memory_findings(run, here, host)) == ""
    assert "may need 201 MB" in said(shared_memory_findings(loading, 2, docker))
    assert said(shared_memory_findings(loading, 2, larger)) == ""


# what DeepSpeed compiles


@pytest.mark.parametrize(
    "device, config, offload, ops",
    [
        ("cpu", {}, None, {"deepspeed_shm_comm"}),
        ("cuda", {}, None, set()),
        ("cuda", {}, "cpu", {"cpu_adam"}),
        ("cuda", {"zero_force_ds_cpu_optimizer": False}, "cpu", set()),
        ("cuda", ADAM, None, {"fused_adam"}),
        ("cuda", {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None, set()),
        ("cuda", ADAM, "cpu", {"cpu_adam"}),
        ("cuda", {"optimizer": {"type": "Lion"}}, None, {"fused_lion"}),
        ("cuda", {"optimizer": {"type": "SGD"}}, None, set()),
        ("cuda", NVME, "nvme", {"cpu_adam", "async_io"}),
        ("cpu", ADAM, None, {"deepspeed_shm_comm", "fused_adam"}),
    ],
)
def test_the_ops_of_a_run(settings, device, config, offload, ops):
    assert ops_of(Strategy("zero2", 2, ds_config(config, offload), "c.json"), device, settings) == ops


def build(settings, host, device="cuda", config=None, offload=None) -> str:
    strategy = Strategy("zero2", 2, ds_config(config or {}, offload), "c.json")
    return said(build_findings(strategy, device, settings, host))


def test_a_compiler_is_needed_where_an_op_is_built(settings, tmp_path):
    bare = without(machine(tmp_path), "/usr/bin/c++")
    assert "lacks a C++ compiler (c++) [ZR603]" in build(settings, bare, "cpu")
    assert build(settings, machine(tmp_path / "with"), "cpu") == ""
    assert build(settings, bare, "cuda") == ""  # nothing is built
    assert said(build_findings(Strategy("ddp", 2), "cpu", settings, bare)) == ""
    clang = machine(tmp_path, {"/usr/bin/clang++": "#!/bin/sh\n"}, CXX="clang++")
    assert build(settings, without(clang, "/usr/bin/c++"), "cpu") == ""
    without(machine(tmp_path), "/usr/bin/c++")
    write_compiled(tmp_path / "extensions" / "deepspeed_shm_comm")
    assert build(settings, bare, "cpu") == ""  # compiled before
    assert "cannot compile cpu_adam, for" in build(settings, bare, "cpu", {}, "cpu")


def test_what_another_environment_has_compiled_does_not_count(tmp_path):
    """Ninja would compile it again, inside the run."""
    host = machine(tmp_path)
    extensions = tmp_path / "extensions"
    write_compiled(extensions / "mine")
    assert is_compiled("mine", host)
    write_compiled(extensions / "others", "/other/deepspeed")
    assert not is_compiled("others", host)
    write_compiled(extensions / "py311_cpu" / "elsewhere")  # below the default root alone
    assert not is_compiled("elsewhere", host)
    write_compiled(extensions / "async_io")
    assert not is_compiled("async_io", host), "it loads pin_memory first"
    write_compiled(extensions / "pin_memory")
    assert is_compiled("async_io", host)


def test_the_folder_of_an_extension_is_torchs(monkeypatch, tmp_path):
    from torch.utils.cpp_extension import _get_build_directory

    for name, value in (("TORCH_EXTENSIONS_DIR", str(tmp_path)), ("XDG_CACHE_HOME", str(tmp_path / "cache"))):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setenv(name, value)
        assert str(extension_folder(os.environ, "some_op")) == _get_build_directory("some_op", False)


def test_headers_of_python_and_libaio(settings, tmp_path):
    host = without(machine(tmp_path), f"{sysconfig.get_path('include')}/Python.h")
    assert "Python.h" in build(settings, host, "cpu")
    host = without(machine(tmp_path), "/usr/include/libaio.h")
    assert "lacks libaio.h" in build(settings, host, "cpu", NVME, "nvme")
    assert build(settings, host, "cpu", {}, "cpu") == ""
    elsewhere = machine(tmp_path, {"/opt/aio/libaio.h": ""}, CFLAGS="-O2 -I/opt/aio")
    assert build(settings, without(elsewhere, "/usr/include/libaio.h"), "cpu", NVME, "nvme") == ""
    assert build(settings, machine(tmp_path), "cpu", NVME, "nvme") == ""


def test_a_prebuilt_op_needs_nothing(settings, tmp_path, monkeypatch):
    bare = without(machine(tmp_path), "/usr/bin/c++")
    monkeypatch.setattr(git_version_info, "accelerator_name", "cpu")
    monkeypatch.setitem(git_version_info.installed_ops, "deepspeed_shm_comm", True)
    assert build(settings, bare, "cpu") == ""


def test_the_cuda_toolkit_where_a_cuda_op_is_built(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    host = machine(tmp_path)
    assert "lacks the CUDA toolkit 13.0 (nvcc) [ZR603]" in build(settings, host, config=ADAM)
    assert build(settings, host, config={}, offload="cpu") == ""  # cpu_adam is plain C++ on a GPU machine too
    for release, found in (
        ("13.1", ""),
        ("12.4", "warning: the CUDA toolkit is 12.4, torch was built with CUDA 13.0 [ZR607]"),
    ):
        nvcc = f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n"
        for files, variables in (({"/usr/bin/nvcc": nvcc}, {}), ({"/cu/bin/nvcc": nvcc}, {"CUDA_HOME": "/cu"})):
            root = tmp_path / release / next(iter(files)).split("/")[1]
            variables = {name: str(root / value.lstrip("/")) for name, value in variables.items()}
            assert build(settings, machine(root, files, **variables), config=ADAM) == found


# caches


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An offline hub cache with the model o/m: a snapshot whose files a test adds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--o--m"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_model_that_is_not_whole_in_the_cache_of_an_offline_run(settings, hub):
    settings = settings.replace(**{"model_name_or_path": "o/m"})

    def missing():
        return (
            said(f for f in cache.offline_findings(settings) if "model" in f.what)
            .partition("cache: no ")[2]
            .removesuffix(" [ZR613]")
        )

    assert cache.missing_of_model(settings.replace(**{"model_name_or_path": "o/other"})) == "snapshot of it"
    assert missing() == "config.json"
    (hub / "config.json").write_text("{}")
    assert missing() == "weights"
    settings = settings.replace(random_weights=True)
    assert missing() == ""
    settings = settings.replace(random_weights=False)
    (hub / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (hub / "1.safetensors").write_text("")
    assert missing() == "2.safetensors"
    (hub / "2.safetensors").write_text("")
    assert missing() == ""


def test_data_that_is_not_in_the_cache_of_an_offline_run(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for other in (settings.dataset_name, "./nowhere", "json", None):  # a folder, a path, a format; nothing at all
        assert said(cache.offline_findings(settings.replace(dataset_name=other))) == ""
    mixture = [{"path": "json", "data_files": "x.jsonl"}, {"path": "somebody/rows"}]
    lacking = [settings.replace(dataset_name="somebody/rows"), settings.replace(datasets=mixture)]
    for found in lacking:
        assert "somebody/rows is not in the cache [ZR614]" in said(cache.offline_findings(found))
    cached = tmp_path / "datasets" / "somebody___rows" / "default" / "0.0.0" / "abc"
    cached.mkdir(parents=True)
    (cached / "dataset_info.json").write_text('{"config_name": "default"}')
    for found in lacking:
        assert said(cache.offline_findings(found)) == ""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    cached.rename(tmp_path / "gone")
    assert said(cache.offline_findings(lacking[0])) == ""  # it will be downloaded


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
        monkeypatch.setattr(cache, "PROBE_SECONDS", 0.2)
        Side(recipe="model_name_or_path: nobody/has-this\nrandom_weights: true").write(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert cli.main(["check", "recipe.yaml"]) == 2
        assert os.environ["HF_HUB_OFFLINE"] == "1" and datasets.config.HF_HUB_OFFLINE
        text = capsys.readouterr().out
        assert text.count("[ZR430]") == 1 and text.count("[ZR613]") == 1
        assert cli.main(["check", "recipe.yaml"]) == 2
        assert "[ZR430]" not in capsys.readouterr().out, "what is offline is not asked again"


def test_a_closed_port_is_no_answer_and_nothing_is_asked_where_all_is_here(tmp_path, online, monkeypatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert not cache._answers()
    monkeypatch.setattr(cache, "_answers", lambda: pytest.fail("the hub was asked"))
    Side().write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml"]) == 0


def test_what_lies_outside_of_a_pods_volume(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/home/me/.cache/huggingface/hub")
    mounts = {"/proc/self/mounts": "overlay / overlay rw 0 0\nnvme /workspace ext4 rw 0 0\n"}
    settings = settings.replace(**{"model_name_or_path": "o/m"})
    pod = machine(tmp_path, mounts, RUNPOD_POD_ID="x")
    found = list(cache.volume_findings(settings, Path("/opt/out"), pod))
    assert [f.what.partition(",")[0] for f in found] == ["the Hugging Face cache", "output_dir"]
    assert "HF_HOME=/workspace/cache/huggingface" in found[0].fix
    assert said(cache.volume_findings(settings, Path("/opt/out"), machine(tmp_path, mounts))) == ""  # no pod
    no_volume = machine(tmp_path, {"/proc/self/mounts": "overlay / overlay rw 0 0\n"}, RUNPOD_POD_ID="x")
    assert said(cache.volume_findings(settings, Path("/opt/out"), no_volume)) == ""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/workspace/cache/huggingface/hub")
    pod = machine(tmp_path, mounts, RUNPOD_POD_ID="x")
    assert said(cache.volume_findings(settings, Path("/workspace/out"), pod)) == ""


# GPUs


def cards(monkeypatch, *found: tuple[tuple[int, int], str]) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_90"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(found))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda number: found[number][0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: found[number][1])


def test_cards_without_kernels_or_without_bf16_are_refused(monkeypatch):
    cards(monkeypatch, ((8, 0), "A100"), ((7, 5), "Tesla T4"), ((7, 0), "V100"))
    found = [(finding.code, finding.level, finding.what) for finding in machines.card_findings("bf16")]
    assert [code for code, *_ in found] == ["ZR272", "ZR640"] and {level for _, level, _ in found} == {"error"}
    assert "GPU 1 (Tesla T4), of compute capability 7.5" in found[0][2] and found[1][2].startswith("GPU 2 (V100) has")
    assert [finding.code for finding in machines.card_findings("fp16")] == ["ZR640"]
    cards(monkeypatch, ((9, 0), "H100"))
    assert not list(machines.card_findings("bf16"))
    cards(monkeypatch, ((6, 0), "gfx"))
    monkeypatch.setattr("torch.version.cuda", None)  # ROCm names its cards otherwise
    assert not list(machines.card_findings("bf16"))


def visible(monkeypatch, count, busy=""):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, busy))


def test_gpus_that_stay_idle_are_named_with_the_launch_that_takes_them(monkeypatch):
    visible(monkeypatch, 8)
    (finding,) = machines.count_findings(Strategy("ddp", 2), 2, {})
    assert (finding.code, finding.level) == ("ZR354", "warning")
    assert "6 of 8 GPUs stay idle" in finding.what and "--num_processes 8 " in finding.fix
    (finding,) = machines.count_findings(Strategy("ddp", 4), 2, {})  # two machines
    assert "--num_processes 16 " in finding.fix
    for here, environment in ((8, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"})):
        assert list(machines.count_findings(Strategy("ddp", here), here, environment)) == []
    visible(monkeypatch, 8, "70000\n70000\n70000\n70000\n70000\n70000\n3\n3\n")
    assert list(machines.count_findings(Strategy("ddp", 2), 2, {})) == []  # others train on the rest


def test_quantized_gradients_need_a_process_for_each_gpu_of_a_machine(monkeypatch):
    strategy = Strategy("z", 8, ds_config({"zero_optimization": {"zero_quantized_gradients": True}}, stage=3), "c.json")
    for here, count, found in ((4, 4, []), (4, 8, ["ZR268"]), (2, 4, ["ZR268"])):
        visible(monkeypatch, count)
        findings = machines.count_findings(strategy, here, {"CUDA_VISIBLE_DEVICES": "all of them"})
        assert [finding.code for finding in findings] == found
    one_machine = Strategy("z", 4, strategy.ds_config, "c.json")
    visible(monkeypatch, 8)
    assert [f.code for f in machines.count_findings(one_machine, 4, {})] == ["ZR354"]  # nothing is quantized there


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."
MODULE = "NVRM version: NVIDIA UNIX {}x86_64 Kernel Module  {}  Release Build\nGCC version: gcc 12.2.0\n"


def pod(root, version="550.54.15", gpus=1, **environment):
    files = {f"/dev/nvidia{number}": "" for number in range(gpus)}
    files |= {"/proc/driver/nvidia/version": MODULE.format("", version)} if version else {}
    return machine(root, files, **environment)


def test_a_gpu_that_torch_cannot_use_is_refused_where_the_cpu_is_not_meant(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def found(host, use_cpu=False):
        return list(machines.driver_findings(use_cpu, host, lambda: TOO_OLD))

    (finding,) = found(pod(tmp_path / "old"))
    assert (finding.code, finding.level, finding.scope) == ("ZR650", "error", "machine")
    assert "driver 550.54.15, /dev/nvidia0" in finding.what and TOO_OLD in finding.why and "driver 580" in finding.why
    assert [f.code for f in found(pod(tmp_path / "given none", gpus=0))] == ["ZR650"]
    assert found(pod(tmp_path / "cpu"), use_cpu=True) == []
    for hidden in ("", "-1"):
        assert found(pod(tmp_path / "hidden", CUDA_VISIBLE_DEVICES=hidden)) == []
    assert found(machine(tmp_path / "laptop", {"/dev/nvidiactl": "", "/dev/nvidia-uvm": ""})) == []
    monkeypatch.setattr("torch.version.cuda", None)
    assert found(pod(tmp_path / "cpu-build")) == []
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert found(pod(tmp_path / "sound", "580.65.06")) == []


def test_both_kinds_of_kernel_module_are_read(tmp_path):
    written = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
    assert machines.driver_version(machine(tmp_path, {"/proc/driver/nvidia/version": written})) == "570.86.15"
    assert machines.driver_version(pod(tmp_path / "closed")) == "550.54.15"
    assert machines.driver_version(machine(tmp_path / "other", {"/proc/driver/nvidia/version": "?"})) is None


# libcuda.so.1 of another driver: its version and the answer of cuInit come from the environment
LIBCUDA = """#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = atoi(getenv("FAKE_CUDA")); return 0; }
int cuInit(unsigned flags) { return atoi(getenv("FAKE_CUINIT")); }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""
ASK = """import sys
from pathlib import Path
from zero_recipes.checks.machine import driver_findings
from zero_recipes.core.host import Host
print(*driver_findings(False, Host(Path(sys.argv[1]), {})))
"""


@pytest.mark.skipif(torch.version.cuda is None or not shutil.which("gcc"), reason="torch is no CUDA build")
def test_a_cuda_build_of_torch_under_other_drivers(tmp_path):
    """torch's real words: a library stands in for the driver's, and torch asks it in a process of its own."""
    (tmp_path / "fake.c").write_text(LIBCUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "fake.c"], cwd=tmp_path, check=True)
    too_old = str((int(torch.version.cuda.split(".")[0]) - 1) * 1000)
    for version, answer, words in ((too_old, "0", "too old"), ("99990", "999", "CUDA unknown error")):
        root = pod(tmp_path / answer, "999.1").root
        fake = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_CUDA": version, "FAKE_CUINIT": answer, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", ASK, root]
        done = subprocess.run(command, env=os.environ | fake, capture_output=True, text=True)
        assert "[ZR650]" in done.stdout and words in done.stdout, done.stdout + done.stderr


def test_a_run_on_such_a_pod_is_refused_and_use_cpu_trains(tmp_path, monkeypatch):
    """The whole preflight: nothing else is found in a recipe that is otherwise sound."""
    from zero_recipes.checks.preflight import preflight

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machines, "driver_version", lambda host: "550.54.15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = write_recipe(tmp_path)
    for use_cpu, expected in (("false", ["ZR650"]), ("true", [])):
        overrides = ["--output_dir", str(tmp_path / "out"), "--use_cpu", use_cpu]
        _, findings = preflight(path, recipes.read_recipe_file(path), overrides, {})
        assert [finding.code for finding in findings if finding.level == "error"] == expected, said(findings)


def test_triton_needs_a_compiler_headers_and_a_cache_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_triton_available", lambda: True)

    def gcc(root, **environment):
        return machine(root, {"/usr/bin/gcc": "#!/bin/sh\n"}, HOME="/home/me", **environment)

    assert said(machines.triton_findings("cuda", gcc(tmp_path / "sound"))) == ""
    bare = without(gcc(tmp_path / "bare"), "/usr/bin/gcc")  # c++ is still there, which Triton does not call
    assert "lacks the C compiler gcc or clang [ZR652]" in said(machines.triton_findings("cuda", bare))
    assert said(machines.triton_findings("cpu", bare)) == ""
    assert said(machines.triton_findings("cuda", machine(tmp_path / "c", {"/usr/bin/clang": "#!/bin/sh\n"}))) == ""
    assert "compiler icx -O2 " in said(machines.triton_findings("cuda", gcc(tmp_path / "cc", CC="icx -O2")))
    headers = without(gcc(tmp_path / "headers"), f"{sysconfig.get_path('include')}/Python.h")
    assert "lacks Python's headers (Python.h) [ZR652]" in said(machines.triton_findings("cuda", headers))
    for variables, folder in (
        ({}, "/home/me/.triton/cache"),
        ({"TRITON_HOME": "/t"}, "/t/.triton/cache"),
        ({"TRITON_CACHE_DIR": "/volume/t", "TRITON_HOME": "/t"}, "/volume/t"),
    ):
        assert str(machines.triton_cache(gcc(tmp_path / "folder", **variables))) == folder
    host = gcc(tmp_path / "closed")
    (tmp_path / "closed" / "home").mkdir()
    opened = []
    monkeypatch.setattr("os.access", lambda path, mode: opened.append(path))
    monkeypatch.setattr(Host, "which", lambda host, name: name)
    assert "lacks the right to write to /home/me/.triton/cache" in said(machines.triton_findings("cuda", host))
    assert opened == [tmp_path / "closed" / "home"]  # the first that exists


# locked memory and the network

LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {0}                {0}                bytes\n"


def test_how_much_a_process_may_lock(tmp_path):
    def may(limit, capabilities):
        status = f"Name:\tpython\nCapInh:\t0000000000000000\nCapEff:\t{capabilities}\n"
        return machine(tmp_path, {"/proc/self/limits": LIMITS.format(limit), "/proc/self/status": status}).lockable()

    assert may("65536", "00000000a80425fb") == 65536  # Docker's own, even for root
    assert may("65536", "00000000a80465fb") == math.inf  # --cap-add IPC_LOCK
    assert may("unlimited", "0000000000000000") == math.inf
    assert Host().lockable() in (math.inf, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])  # as this machine writes it


def test_swap_buffers_that_may_not_be_locked_are_refused(settings, tmp_path):
    (tmp_path / "disk").mkdir()
    block = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "buffer_size": 5_000_000, "buffer_count": 5}
    run = run_of(settings, stage=3)
    both = {"offload_param": block, "offload_optimizer": {"device": "nvme", "nvme_path": block["nvme_path"]}}
    for zero, needed in (({"offload_param": block}, 50_000_000), (both, 50_000_000 + 4 * 4 * 2_500_000)):
        strategy = Strategy("z", 2, ds_config({"zero_optimization": zero}, stage=3), "c.json")
        swapping = dataclasses.replace(run, strategy=strategy)
        for limit, codes in ((needed - 1, ["ZR655"]), (needed, [])):
            host = machine(tmp_path, {"/proc/self/limits": LIMITS.format(limit), "/proc/self/status": "CapEff:\t0\n"})
            findings = list(nvme_findings(swapping, [10**7], 2, host))
            errors = [f for f in findings if f.level == "error"]
            assert [f.code for f in errors] == codes and all("memlock=-1" in f.fix for f in errors)


def test_infiniband_that_a_container_only_sees_is_named(tmp_path, monkeypatch):
    """Warnings in the order in which they are cured: the device's file, the library, locked memory."""
    monkeypatch.setattr(machines, "has_libibverbs", lambda: False)
    shown = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA", "/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0\n"}

    def found(host, several=True, device="cuda", **environment):
        return said(machines.infiniband_findings(device, several, environment, host))

    closed = machine(tmp_path, shown)
    assert "(mlx5_0), and NCCL cannot use it: /dev/infiniband/uverbs* is closed" in found(closed)
    assert found(machine(tmp_path / "none")) == found(closed, several=False) == found(closed, device="cpu") == ""
    assert found(closed, NCCL_IB_DISABLE="1") == found(closed, NCCL_NET="Socket") == ""
    little = {"/proc/self/limits": LIMITS.format(8_388_608), "/proc/self/status": "CapEff:\t0\n"}
    opened = machine(tmp_path, shown | {"/dev/infiniband/uverbs3": ""} | little)
    assert "libibverbs.so.1 is not found" in found(opened)
    monkeypatch.setattr(machines, "has_libibverbs", lambda: True)
    assert "each process may lock 8.39 MB of memory alone [ZR656]" in found(opened)
    assert found(machine(tmp_path, {"/proc/self/limits": LIMITS.format("unlimited")})) == ""


@pytest.mark.parametrize(
    "capability, built, runs",
    [
        ((8, 0), ["sm_80"], True),
        ((8, 9), ["sm_80", "sm_86"], True),  # within 8
        ((8, 0), ["sm_86"], False),  # not downwards
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # PTX is compiled for it
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False),  # V100 and a wheel of CUDA 13
        ((12, 0), ["sm_80", "sm_90", "sm_100"], False),  # RTX 50 and an older wheel
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 1), ["sm_50", "sm_120"], True),
    ],
)
def test_which_cards_a_build_of_torch_has_kernels_for(capability, built, runs):
    assert machines.has_kernels(capability, built) is runs


# all together


def test_one_bad_machine_refuses_a_run_and_only_warns_where_a_run_elsewhere_is_checked(settings, tmp_path):
    host = without(machine(tmp_path), "/usr/bin/c++")
    run = run_of(settings, device="cpu", output_dir=tmp_path)
    for rehearsal, level, start in (
        (False, "error", "DeepSpeed"),
        ("here", "error", "DeepSpeed"),
        ("elsewhere", "warning", "on"),
    ):
        (finding,) = machines.machine_findings(run, {}, host, rehearsal)
        assert (finding.level, finding.what.split()[0], finding.scope) == (level, start, "machine")
    assert machines.machine_findings(run, {}, machine(tmp_path / "fixed"), False) == []


def test_check_refuses_a_machine_that_the_recipe_means(tmp_path, monkeypatch, capsys):
    """The verb itself: the same machine without a compiler, with `use_cpu: true` and without."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    recipe = write_recipe(tmp_path, deepspeed="ds_configs/zero2.json")
    argv = ["check", str(recipe), "--output_dir", str(tmp_path / "out")]
    assert cli.main([*argv, "--use_cpu", "true"]) == 2
    assert "refused: DeepSpeed cannot compile" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert cli.main(argv) == 0
        assert "warning: on this machine: DeepSpeed cannot compile" in capsys.readouterr().out


def test_each_finding_is_said_by_the_ranks_of_its_scope(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    findings = [Finding("ZR000", scope, "w", "c", scope=scope) for scope in ("run", "machine", "rank")]
    for rank, local_rank, says in ((0, 0, ["run", "machine", "rank"]), (8, 0, ["machine", "rank"]), (9, 1, ["rank"])):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        print_refusal(Refusal(findings))
        heard = [line.removeprefix("refused: ") for line in capsys.readouterr().err.splitlines() if "refused" in line]
        assert heard == [f"{scope} [ZR000]" for scope in says]
