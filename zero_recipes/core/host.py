"""The machine that a run is on: its memory, cores, disks and compilers. Importing it does not import torch."""

import math
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CAP_IPC_LOCK = 14  # linux/capability.h


@dataclass(frozen=True)
class Host:
    """A machine as it is seen from the folder `root`; tests give a folder that looks like one."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs

    def at(self, path: str | Path) -> Path:
        """The place of an absolute path of the machine, below `root`."""
        return self.root / str(path).lstrip("/")

    def memory(self) -> tuple[int, str]:
        """Count the memory that processes here may still take, and name what limits it. psutil knows no cgroups.

        Returns (bytes with free swap, the source of the limit in words).
        """
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
        """Count the cores' worth of time that processes here may take: a pod shows all of its machine and a quota."""
        least = len(os.sched_getaffinity(0))
        for path in self._cgroup_files("cpu.max"):
            quota, _, period = self.read(path).partition(" ")
            if quota.isdigit():  # else "max"
                least = min(least, int(quota) / int(period))
        return max(1, int(least))

    def threads(self, processes: int) -> int:
        """Share the cores among so many processes: the threads of each, at least 1."""
        return max(1, self.cores() // processes)

    def _cgroup_files(self, name: str) -> list[Path]:
        """Of this process's cgroup (version 2) and of those above it; a container's own shows as the root."""
        own = self._find(r"^0::(.*)", "/proc/self/cgroup") or ""
        folder = Path("/sys/fs/cgroup" + own)
        return [above / name for above in (folder, *folder.parents)]

    def free_disk(self, folder: str | Path) -> int:
        """Count the bytes that this user may still write where `folder` is, or will be made."""
        path = self.at(Path(folder).absolute())
        while not path.exists():
            path = path.parent
        stat = self.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def lockable(self) -> float:
        """Count the bytes that each process may lock in memory (RLIMIT_MEMLOCK).

        They are infinite with CAP_IPC_LOCK (mlock(2)).
        """
        soft_limit = self._find(r"^Max locked memory\s+(\d+)", "/proc/self/limits")
        capabilities = self._find(r"^CapEff:\s*([0-9a-f]+)", "/proc/self/status") or "0"
        if soft_limit is None or int(capabilities, 16) >> CAP_IPC_LOCK & 1:
            return math.inf
        return int(soft_limit)

    def compiler(self) -> str | None:
        """Find the C++ compiler that torch calls; None if it is missing.

        See `get_cxx_compiler` in torch/utils/cpp_extension.py.
        """
        return self.which(self.environment.get("CXX", "c++"))

    def which(self, program: str) -> str | None:
        """Find a program on the machine's PATH; None if it is missing."""
        return shutil.which(program, path=self.environment.get("PATH", os.defpath))

    def python_headers(self) -> bool:
        """Whether Python's headers are installed, which a compiled kernel includes."""
        return (self.at(sysconfig.get_path("include")) / "Python.h").is_file()

    def libaio_headers(self) -> bool:
        """Whether libaio's header is in the usual folders, in CPATH, or in what CFLAGS adds."""
        folders = ["/usr/include", "/usr/local/include", *self.environment.get("CPATH", "").split(":")]
        folders += re.findall(r"-I(\S+)", self.environment.get("CFLAGS", ""))
        return any((self.at(folder) / "libaio.h").is_file() for folder in folders if folder)

    def cuda_release(self) -> str | None:
        """The version of the CUDA toolkit, as "13.0"; None without one.

        It is found as torch finds it (torch/utils/cpp_extension.py).
        """
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
        """Read a file of the machine; empty where there is none."""
        try:
            return self.at(path).read_text().strip()
        except OSError:
            return ""

    def _find(self, pattern: str, path: str) -> str | None:
        found = re.search(pattern, self.read(path), re.MULTILINE)
        return found[1] if found else None
