"""The machine under a run, as a fake root shows it: each bad machine is found, its fixed twin passes."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed import git_version_info
from transformers import AutoModelForCausalLM

from tests.helpers.compiled import write_compiled
from tests.helpers.tiny import write_recipe
from zero_recipes.checks import cache, gpus, this_machine
from zero_recipes.checks.capacity import (
    disk_findings,
    download_findings,
    memory_findings,
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
from zero_recipes.core.host_limits import Host
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


def test_a_download_that_does_not_fit(settings, tmp_path):
    for free, found in ((14 * GB - 1, True), (14 * GB, False)):
        host = machine(tmp_path, free=free)
        assert ("at least 14.0 GB" in said(download_findings(settings, PSI, tmp_path, host))) == found


def test_shared_memory(settings, tmp_path):
    docker, larger = machine(tmp_path, free=64 * 2**20), machine(tmp_path, free=2**30)
    (finding,) = shared_memory_findings(run_of(settings), 2, docker)
    assert (
        "67.1 MB free, for 2 GPUs" in finding.what
        and (finding.code, finding.level) == ("ZR611", "warning")
        and "--shm-size" in finding.fix
    )
    for run, here, host in (
        (run_of(settings), 2, larger),
        (run_of(settings), 1, docker),
        (run_of(settings, "cpu"), 2, docker),
    ):
        assert said(shared_memory_findings(run, here, host)) == ""
    loaders = dict(dataloader_num_workers=8, per_device_train_batch_size=32, max_length=8192)
    assert "data loaders put up to 201 MB" in said(
        shared_memory_findings(run_of(settings, "cpu", **loaders), 2, docker)
    )
    assert said(shared_memory_findings(run_of(settings, "cpu", **loaders), 2, larger)) == ""


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
    assert said(cache.offline_findings(settings)) == ""  # a folder
    for other in ("./nowhere", "json", None):  # a path, right or wrong; a format; nothing at all
        assert said(cache.offline_findings(settings.replace(**{"dataset_name": other}))) == ""
    named = settings.replace(**{"dataset_name": "somebody/rows"})
    assert "somebody/rows is not in the cache [ZR614]" in said(cache.offline_findings(named))
    mixed = settings.replace(datasets=[{"path": "json", "data_files": "x.jsonl"}, {"path": "somebody/rows"}])
    assert "somebody/rows is not in the cache [ZR614]" in said(cache.offline_findings(mixed))
    cached = tmp_path / "datasets" / "somebody___rows" / "default" / "0.0.0" / "abc"
    cached.mkdir(parents=True)
    (cached / "dataset_info.json").write_text("{}")
    assert "[ZR614]" in said(cache.offline_findings(named))  # broken
    (cached / "dataset_info.json").write_text('{"config_name": "default"}')
    for found in (named, mixed):
        assert said(cache.offline_findings(found)) == ""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    cached.rename(tmp_path / "gone")
    assert said(cache.offline_findings(named)) == ""  # it will be downloaded


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


def test_gpus_without_peer_access(monkeypatch):
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    (finding,) = gpus.peer_findings("cuda", 3, {})
    assert (finding.code, finding.level) == ("ZR617", "warning") and finding.what.endswith(" 0-2")
    for device, here, environment in (("cuda", 2, {}), ("cpu", 3, {}), ("cuda", 3, {"NCCL_P2P_DISABLE": "1"})):
        assert said(gpus.peer_findings(device, here, environment)) == ""


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
    assert gpus.has_kernels(capability, built) is runs


def test_a_card_without_kernels_is_refused_before_anything_is_loaded(monkeypatch):
    cards = [((8, 0), "A100"), ((7, 0), "V100")]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_90"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(cards))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda number: cards[number][0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: cards[number][1])
    (finding,) = gpus.capability_findings("cuda")
    assert (finding.code, finding.level) == ("ZR640", "error") and finding.what.startswith("GPU 1 (V100) has")
    assert said(gpus.capability_findings("cpu")) == ""
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_70", "sm_80"])
    assert said(gpus.capability_findings("cuda")) == ""
    monkeypatch.setattr("torch.version.cuda", None)  # ROCm
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["gfx90a"])
    assert said(gpus.capability_findings("cuda")) == ""


def test_cards_on_which_accelerate_stops(monkeypatch):
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr("accelerate.utils.check_cuda_p2p_ib_support", lambda: False)
    torchrun = {"RANK": "0"}
    assert said(gpus.peer_findings("cuda", 2, torchrun)).endswith("[ZR616]")
    disabled = torchrun | {"NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "1"}  # accelerate looks for the names only
    assert said(gpus.peer_findings("cuda", 2, disabled)) == ""
    assert said(gpus.peer_findings("cuda", 2, {})) == ""  # check: accelerate launch sets them


# all together


def test_one_bad_machine_refuses_a_run_and_only_warns_where_a_run_elsewhere_is_checked(settings, tmp_path):
    host = without(machine(tmp_path), "/usr/bin/c++")
    run = run_of(settings, device="cpu", output_dir=tmp_path)
    for rehearsal, level, start in (
        (False, "error", "DeepSpeed"),
        ("here", "error", "DeepSpeed"),
        ("elsewhere", "warning", "on"),
    ):
        (finding,) = this_machine.machine_findings(run, {}, host, rehearsal)
        assert (finding.level, finding.what.split()[0], finding.scope) == (level, start, "machine")
    assert this_machine.machine_findings(run, {}, machine(tmp_path / "fixed"), False) == []


def test_check_names_a_stale_lock_and_a_run_does_not_repeat_it(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.process_iter", lambda: [])
    host = machine(tmp_path, {"/extensions/cpu_adam/lock": ""})
    os.utime(tmp_path / "extensions" / "cpu_adam" / "lock", (1, 1))
    run = run_of(settings, device="cpu", stage=None, output_dir=tmp_path)
    (finding,) = this_machine.machine_findings(run, {}, host, "here")
    assert (finding.code, finding.level) == ("ZR623", "warning") and "cpu_adam/lock" in finding.what
    assert this_machine.machine_findings(run, {}, host, False) == []


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
