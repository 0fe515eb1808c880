"""What one machine offers to a run, read from its files: memory, disk, shared memory, mounts and build tools."""

from __future__ import annotations

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
