"""The machine: what it offers to a run, what a measurement was made on, and the GPUs that a plan knows.

Importing it does not import torch.
"""

from __future__ import annotations

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
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_recipes.core.findings import refusal

# host_limits

CAP_IPC_LOCK = 14  # linux/capability.h


@dataclass(frozen=True)
class Host:
    """The machine as seen from `root`, with the variables of the run and a statvfs of its file systems.

    Tests give a folder that looks like a machine; a run takes the defaults.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs

    def at(self, path: str | Path) -> Path:
        """An absolute path of the machine, below `root`."""
        return self.root / str(path).lstrip("/")

    def memory(self) -> tuple[int, str]:
        """(bytes that processes here may still take, free swap included, and what sets that limit).

        The least of MemAvailable and the limits of the process's cgroup and of all above it: version 2 memory.max,
        version 1 memory.limit_in_bytes. What a container's cgroup shows as its root is its own limit.
        """
        found = [(self._meminfo("MemAvailable"), "MemAvailable in /proc/meminfo")]
        for path, version in self._cgroups("memory"):
            name = "memory.max" if version == 2 else "memory.limit_in_bytes"
            limit = self._read(path / name)
            if limit is not None and limit.isdigit():
                found.append((int(limit), f"the cgroup's {name}"))
        limit, source = min(found)
        swap = self._meminfo("SwapFree")
        return limit + swap, f"{source} and free swap" if swap else source

    def _meminfo(self, name: str) -> int:
        """Bytes; meminfo counts in KiB."""
        for line in self.at("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return 0

    def cores(self) -> int:
        """Cores' worth of time that processes here may take: those they may run on, and the quotas of their cgroups.

        A rented pod shows all cores of its machine and a quota: version 2 cpu.max, version 1 cpu.cfs_quota_us.
        """
        found = [float(len(os.sched_getaffinity(0)))]
        for path, version in self._cgroups("cpu"):
            if version == 2:
                quota, period = (self._read(path / "cpu.max") or "max 1").split()
            else:
                quota, period = (self._read(path / f"cpu.cfs_{what}_us") or "-1" for what in ("quota", "period"))
            if quota.isdigit():
                found.append(int(quota) / int(period))
        return max(1, int(min(found)))

    def threads(self, processes: int) -> int:
        """For each of so many processes its share of the cores, one at least."""
        return max(1, self.cores() // processes)

    def _cgroups(self, controller: str) -> list[tuple[Path, int]]:
        """[(folder of this process's cgroup or of one above it, version)]: /proc/self/cgroup, cgroups(7)."""
        found = []
        for line in (self._read(self.at("/proc/self/cgroup")) or "").splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0":
                folder, version = self.at("/sys/fs/cgroup" + path), 2
            elif controller in controllers.split(","):
                folder, version = self.at(f"/sys/fs/cgroup/{controller}" + path), 1
            else:
                continue
            found += [(above, version) for above in (folder, *folder.parents)]
        return found

    def free_disk(self, folder: str | Path) -> int:
        """Bytes that this user may still write where `folder` is, or will be made."""
        path = self.at(Path(folder).absolute())
        while not path.exists():
            path = path.parent
        stat = self.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def shared_memory(self) -> int | None:
        """Free bytes of /dev/shm; None where there is none."""
        path = self.at("/dev/shm")
        return self.free_disk("/dev/shm") if path.is_dir() else None

    def lockable(self) -> float:
        """Bytes that each process may lock in memory (mlock): RLIMIT_MEMLOCK; infinite with CAP_IPC_LOCK, mlock(2)."""
        status, limits = (self._read(self.at(f"/proc/self/{name}")) or "" for name in ("status", "limits"))
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
        soft = re.search(r"^Max locked memory\s+(\d+)", limits, re.MULTILINE)  # not where it is "unlimited"
        if soft is None or (effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1):
            return math.inf
        return int(soft[1])

    def is_mount(self, folder: str) -> bool:
        mounts = (self._read(self.at("/proc/self/mounts")) or "").splitlines()
        return any(line.split()[1] == folder for line in mounts)

    def compiler(self) -> str | None:
        """The C++ compiler that torch calls (torch/utils/cpp_extension.py `get_cxx_compiler`), None if missing."""
        return self.which(self.environment.get("CXX", "c++"))

    def which(self, program: str) -> str | None:
        return shutil.which(program, path=self.environment.get("PATH", os.defpath))

    def python_headers(self) -> bool:
        return (self.at(sysconfig.get_path("include")) / "Python.h").is_file()

    def libaio_headers(self) -> bool:
        """Whether a compiler finds libaio.h: the usual folders, CPATH, and what CFLAGS adds."""
        folders = ["/usr/include", "/usr/local/include", *self.environment.get("CPATH", "").split(":")]
        folders += [flag[2:] for flag in self.environment.get("CFLAGS", "").split() if flag.startswith("-I")]
        return any((self.at(folder) / "libaio.h").is_file() for folder in folders if folder)

    def cuda_release(self) -> str | None:
        """Version of the CUDA toolkit, as "13.0"; None without one.

        Found as torch does (cpp_extension.py `_find_cuda_home`), read as DeepSpeed does (op_builder/builder.py
        `installed_cuda_version`).
        """
        home = self.environment.get("CUDA_HOME") or self.environment.get("CUDA_PATH")
        nvcc = Path(home, "bin/nvcc") if home else Path(self.which("nvcc") or self.at("/usr/local/cuda/bin/nvcc"))
        try:
            words = subprocess.run([nvcc, "-V"], capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            return None
        return words[words.index("release") + 1].rstrip(",") if "release" in words else None

    @staticmethod
    def _read(path: Path) -> str | None:
        try:
            return path.read_text().strip()
        except OSError:
            return None


# pinned_memory

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first of them that is set
KEY = "pinned_max_cached_size_mb"
LIMIT_MIB = 4  # a batch of a data loader stays below it, what DeepSpeed offloads above


def limit_rounding(environment: MutableMapping[str, str]) -> None:
    """Have torch, which is not imported yet, round no large pinned allocation; a limit of the user's own stays."""
    if _own_limit(environment) is None:
        name = _in_force(environment)
        environment[name] = ",".join(filter(None, (environment.get(name, ""), f"{KEY}:{LIMIT_MIB}")))


def pinned_bytes(size: int, environment: Mapping[str, str]) -> int:
    """Bytes of host memory that a run under this environment takes for a pinned tensor of `size` bytes."""
    limit = _own_limit(environment)
    if size <= 1 or size > (LIMIT_MIB if limit is None else limit) << 20:
        return size
    return 1 << (size - 1).bit_length()


def _in_force(environment: Mapping[str, str]) -> str:
    return next((name for name in NAMES if environment.get(name)), NAMES[0])


def _own_limit(environment: Mapping[str, str]) -> int | None:
    """MiB that somebody has set."""
    found = re.search(rf"(?:^|,)\s*{KEY}\s*:\s*(\d+)", environment.get(_in_force(environment), ""))
    return int(found[1]) if found else None


# environment

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "peft", "evaluate")


def library_versions() -> dict[str, str]:
    """{package: installed version}, Python's included."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def hardware_facts(device: str) -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, cores, memory, and the accelerator if one trains."""
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
        }
    return found


def device_name(device: str) -> str:
    if device != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(torch.cuda.current_device())


def peak_memory(device: str) -> dict[str, int | None]:
    """{"allocated", "reserved", "rss"}: peaks in bytes of this process; the first two null without an accelerator."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    if device != "cuda":
        return {"allocated": None, "reserved": None, "rss": rss}
    import torch

    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "rss": rss}


def cpu_name() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# hardware

FP32_SHARE = 1 / 16  # of the bf16 figure: A100 19.5 of 312, without TF32 (torch's default)
OWN = Path(__file__).with_name("hardware.yaml")

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Gpu(BaseModel):
    """One class of GPU. Units stand in the names; GB/s are 10^9 bytes per second and direction."""

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
    achievable: tuple[Share, Share]
    source: Annotated[str, Field(min_length=1)]

    @property
    def memory_bytes(self) -> int:
        """What nvidia-smi shows, in bytes."""
        return self.memory_mib * 1024**2

    def peak_flops(self, precision: str) -> float:
        """Dense FLOP/s of matrix products in "bf16", "fp16", "fp32" or "tf32" (fp32's where the card has none)."""
        fp32 = self.fp32_tflops or self.bf16_tflops * FP32_SHARE
        tflops = {"fp32": fp32, "tf32": self.tf32_tflops or fp32}.get(precision, self.bf16_tflops)
        return tflops * 1e12

    @model_validator(mode="after")
    def _low_before_high(self) -> Gpu:
        if self.achievable[0] > self.achievable[1]:
            raise ValueError("achievable is [low, high]")
        return self


def gpus(extra: Path | None = None) -> dict[str, Gpu]:
    """{name: GPU}; what `extra` names is added, or takes the place of ours. Raises Refusal for a file with a fault."""
    return _read(OWN) | ({} if extra is None else _read(extra))


def gpu_named(name: str, known: dict[str, Gpu]) -> Gpu:
    """The GPU of this name, or the only one whose name begins with it. Raises Refusal."""
    bare = _bare(name)
    found = [key for key in known if _bare(key) == bare] or [key for key in known if _bare(key).startswith(bare)]
    if len(found) == 1:
        return known[found[0]]
    raise refusal(
        "ZR807",
        name=name,
        what=f"{' and '.join(found)} begin so" if found else "no such GPU is known",
        known=", ".join(known),
    )


def peak_flops_of(device_name: str | None, precision: str) -> float | None:
    """Dense FLOP/s of the card that torch.cuda.get_device_name names; None where hardware.yaml does not have it."""
    card = gpu_of_device(device_name)
    return None if card is None else card.peak_flops(precision)


def gpu_of_device(device_name: str | None) -> Gpu | None:
    """The card that torch.cuda.get_device_name names; None where hardware.yaml does not have it."""
    return next((gpu for gpu in gpus().values() if device_name in gpu.names), None)


def _read(path: Path) -> dict[str, Gpu]:
    try:
        content = yaml.safe_load(path.read_text())
        return {
            str(name).lower(): Gpu.model_validate({"name": str(name).lower()} | row) for name, row in content.items()
        }
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValidationError) as error:
        raise refusal("ZR811", path=path, error=" ".join(str(error).split())) from None


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
