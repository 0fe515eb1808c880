"""The machine, and the GPUs that a plan knows. Importing it does not import torch."""

import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from zero_recipes.core.files import load_yaml
from zero_recipes.core.findings import library_error_as_finding, refusal

CAP_IPC_LOCK = 14  # linux/capability.h
PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "peft", "evaluate")


@dataclass(frozen=True)
class Host:
    """The machine as seen from `root`. Tests give a folder that looks like one; a run takes the defaults."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs

    def at(self, path: str | Path) -> Path:
        """An absolute path of the machine, below `root`."""
        return self.root / str(path).lstrip("/")

    def memory(self) -> tuple[int, str]:
        """(bytes that processes here may still take, with free swap; what sets the limit). psutil knows no cgroups."""
        least = self._meminfo("MemAvailable")
        source = "MemAvailable in /proc/meminfo"
        for path in self._cgroup_files("memory.max"):
            limit = self.read(path)
            if limit.isdigit() and int(limit) < least:
                least = int(limit)
                source = "the cgroup's memory.max"
        swap = self._meminfo("SwapFree")
        if swap:
            source += " and free swap"
        return least + swap, source

    def _meminfo(self, name: str) -> int:
        """Bytes; meminfo counts in KiB."""
        return int(self._find(rf"^{name}:\s*(\d+)", "/proc/meminfo") or 0) * 1024

    def cores(self) -> int:
        """Cores' worth of time that processes here may take: a pod shows all of its machine and a quota."""
        least = len(os.sched_getaffinity(0))
        for path in self._cgroup_files("cpu.max"):
            quota, _, period = self.read(path).partition(" ")
            if quota.isdigit():  # else "max"
                least = min(least, int(quota) / int(period))
        return max(1, int(least))

    def threads(self, processes: int) -> int:
        return max(1, self.cores() // processes)

    def _cgroup_files(self, name: str) -> list[Path]:
        """Of this process's cgroup (version 2) and of those above it; a container's own shows as the root."""
        own = self._find(r"^0::(.*)", "/proc/self/cgroup") or ""
        folder = Path("/sys/fs/cgroup" + own)
        return [above / name for above in (folder, *folder.parents)]

    def free_disk(self, folder: str | Path) -> int:
        """Bytes that this user may still write where `folder` is, or will be made."""
        path = self.at(Path(folder).absolute())
        while not path.exists():
            path = path.parent
        stat = self.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def lockable(self) -> float:
        """Bytes that each process may lock in memory (mlock): RLIMIT_MEMLOCK; infinite with CAP_IPC_LOCK, mlock(2)."""
        soft_limit = self._find(r"^Max locked memory\s+(\d+)", "/proc/self/limits")
        capabilities = self._find(r"^CapEff:\s*([0-9a-f]+)", "/proc/self/status") or "0"
        if soft_limit is None or int(capabilities, 16) >> CAP_IPC_LOCK & 1:
            return math.inf
        return int(soft_limit)

    def compiler(self) -> str | None:
        """The C++ compiler that torch calls (torch/utils/cpp_extension.py `get_cxx_compiler`), None if missing."""
        return self.which(self.environment.get("CXX", "c++"))

    def which(self, program: str) -> str | None:
        return shutil.which(program, path=self.environment.get("PATH", os.defpath))

    def python_headers(self) -> bool:
        return (self.at(sysconfig.get_path("include")) / "Python.h").is_file()

    def libaio_headers(self) -> bool:
        """In the usual folders, CPATH, and what CFLAGS adds."""
        folders = ["/usr/include", "/usr/local/include", *self.environment.get("CPATH", "").split(":")]
        folders += re.findall(r"-I(\S+)", self.environment.get("CFLAGS", ""))
        return any((self.at(folder) / "libaio.h").is_file() for folder in folders if folder)

    def cuda_release(self) -> str | None:
        """Version of the CUDA toolkit, as "13.0"; None without one. Found as torch does (cpp_extension.py)."""
        home = self.environment.get("CUDA_HOME") or self.environment.get("CUDA_PATH")
        nvcc = self.which("nvcc") or self.at("/usr/local/cuda/bin/nvcc")
        if home:
            nvcc = Path(home, "bin/nvcc")
        try:
            printed = subprocess.run([nvcc, "-V"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
        found = re.search(r"release ([\d.]+)", printed)
        return found and found[1]

    def read(self, path: str | Path) -> str:
        """Empty where there is no such file."""
        try:
            return self.at(path).read_text().strip()
        except OSError:
            return ""

    def _find(self, pattern: str, path: str) -> str | None:
        found = re.search(pattern, self.read(path), re.MULTILINE)
        return found[1] if found else None


# torch's allocators
#
# GPU memory: expandable segments grow in place, and less of what is freed stays reserved. With them torch ignores
# NCCL_HOOK, which registers memory with NCCL (ProcessGroupNCCL.cpp).
#
# Page-locked host memory: torch 2.13 (ATen/core/CachingHostAllocator.h `allocate`) rounds every pinned allocation up to
# a power of two and keeps what is freed: DeepSpeed's offloaded fp32 weights of Pythia-12B on one GPU take 68.7 GB in
# place of 47.4. Allocations above `pinned_max_cached_size_mb` are neither rounded nor kept. Its neighbour,
# `pinned_max_round_threshold_mb`, alone hands out blocks that are too small (pytorch/pytorch#192722).

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first of them that is set
EXPANDABLE = "expandable_segments:True"
NCCL_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
PINNED_KEY = "pinned_max_cached_size_mb"
KNOWN_FROM = [2, 13]  # torch 2.11: "Unrecognized key", once CUDA is used
PINNED_LIMIT_MIB = 4  # a batch of a data loader stays below it, what DeepSpeed offloads above


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Set torch's allocators, before it is imported. A user's own values stay."""
    name = _allocator_variable(environment) or ALLOCATOR[0]
    value = environment.get(name, "")
    if environment.keys().isdisjoint({*ALLOCATOR, NCCL_HOOK}):
        value = EXPANDABLE
    release = metadata.version("torch").split(".")[:2]
    if PINNED_KEY not in value and [int(number) for number in release] >= KNOWN_FROM:
        value += "," if value else ""
        value += f"{PINNED_KEY}:{PINNED_LIMIT_MIB}"
    if value:
        environment[name] = value


def allocator_settings(environment: Mapping[str, str]) -> str:
    name = _allocator_variable(environment)
    return f"{name}={environment[name]}" if name else "torch's defaults"


def _allocator_variable(environment: Mapping[str, str]) -> str | None:
    return next((name for name in ALLOCATOR if environment.get(name)), None)


def pinned_bytes(size: int, environment: Mapping[str, str]) -> int:
    """Bytes of host memory that a pinned tensor of `size` bytes takes in this environment."""
    found = re.search(rf"{PINNED_KEY}\s*:\s*(\d+)", allocator_settings(environment))
    limit_mib = int(found[1]) if found else PINNED_LIMIT_MIB
    if size <= 1 or size > limit_mib << 20:
        return size
    return 1 << (size - 1).bit_length()


# what a measurement was made on


def library_versions() -> dict[str, str]:
    """{package: installed version}."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str:
    """As installed; zero-recipes has no metadata in a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def hardware_facts(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "gpus_visible": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "allocator": allocator_settings(os.environ),
        }
    return found


def peak_memory(device: str) -> dict[str, int | None]:
    """Peaks in bytes of this process; "allocated" and "reserved" are null without an accelerator."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    peaks = {"allocated": None, "reserved": None, "rss": rss}
    if device == "cuda":
        import torch

        peaks["allocated"] = torch.cuda.max_memory_allocated()
        peaks["reserved"] = torch.cuda.max_memory_reserved()
    return peaks


def cpu_name() -> str:
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


# GPUs: hardware.yaml, which has the source of every figure, and for a plan a user's file in the same form

FP32_SHARE = 1 / 16  # of the bf16 figure: A100 19.5 of 312, without TF32 (torch's default)
OWN = Path(__file__).with_name("hardware.yaml")
Positive = Annotated[float, Field(gt=0)]


class Gpu(BaseModel):
    """One class of GPU. The names have the units; GB/s are 10^9 bytes per second and direction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    memory_mib: Annotated[int, Field(gt=0)]
    names: tuple[str, ...] = ()  # as torch.cuda.get_device_name gives them
    bf16_tflops: Positive
    fp32_tflops: Positive | None = None  # None: a sixteenth of bf16's, as on an A100
    tf32_tflops: Positive | None = None  # None: the card has no TF32
    bf16: bool = True
    memory_gb_s: Positive
    link_gb_s: Positive
    host_gb_s: Positive
    network_gb_s: Positive
    workspace_bytes: int = 8_519_680
    source: Annotated[str, Field(min_length=1)]

    @property
    def memory_bytes(self) -> int:
        """What nvidia-smi shows, in bytes."""
        return self.memory_mib * 1024**2

    def peak_flops(self, precision: str) -> float:
        """Dense FLOP/s of matrix products in "bf16", "fp16", "fp32" or "tf32" (fp32's where the card has none)."""
        fp32 = self.fp32_tflops or self.bf16_tflops * FP32_SHARE
        if precision == "fp32":
            return fp32 * 1e12
        if precision == "tf32":
            return (self.tf32_tflops or fp32) * 1e12
        return self.bf16_tflops * 1e12


def gpus(extra: Path | None = None) -> dict[str, Gpu]:
    """{name: GPU}; `extra` adds to ours, or replaces them. Raises Refusal for a file with a fault."""
    paths = [OWN] if extra is None else [OWN, extra]
    known = {}
    for path in paths:
        with library_error_as_finding(f"reading {path}"):
            for key, row in load_yaml(path.read_text()).items():
                name = str(key).lower()
                known[name] = Gpu.model_validate({"name": name} | row)
    return known


def gpu_named(name: str, known: dict[str, Gpu]) -> Gpu:
    """The GPU of this name, or the only one whose name begins with it. Raises Refusal."""
    if name in known:
        return known[name]
    found = [gpu for key, gpu in known.items() if key.startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    what = f"{' and '.join(gpu.name for gpu in found)} match" if found else "unknown GPU"
    raise refusal("ZR807", name=name, what=what, known=", ".join(known))


def card_named(device_name: str | None) -> Gpu | None:
    """The card that torch.cuda.get_device_name names, if hardware.yaml has it."""
    return next((gpu for gpu in gpus().values() if device_name in gpu.names), None)


def peak_flops_of(device_name: str | None, precision: str) -> float | None:
    """Dense FLOP/s of the card of this name, if it is known."""
    card = card_named(device_name)
    return card and card.peak_flops(precision)
