"""Checks of ZeRO-Infinity against the model: room on the disk, buffers that fit, and whether anything swaps at all.

File names are those of DeepSpeed 0.19.8, under deepspeed/runtime/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero_recipes.config.ds_view import number_in
from zero_recipes.config.run import RunConfig
from zero_recipes.core import units
from zero_recipes.core.errors import Finding
from zero_recipes.core.host_limits import Host
from zero_recipes.theory.lower_bounds import LEAST_SWAPPED, swap_buffers

DEFAULT_MAX_IN_CPU, DEFAULT_BUFFER = 10**9, 10**8  # elements: zero/offload_config.py


def nvme_findings(run: RunConfig, sizes: Sequence[int], here: int, host: Host) -> Iterator[Finding]:
    """`sizes`: elements of each tensor of the model; `here`: processes on this machine."""
    strategy = run.strategy
    config, world = strategy.ds_config, strategy.world_size
    if config is None or not config.on_nvme or config.stage != 3:
        return
    each = 4 if run.settings.precision == "fp32" else 2
    least = max(LEAST_SWAPPED, number_in(config.aio, "block_size", 0))
    parts = [-(-size // world) for size in sizes]
    swapped = [part for part in parts if part * each >= least]
    if strategy.offload_param == "nvme":
        yield from _buffers(config.offload_block("offload_param"), parts, swapped)
        if not swapped:
            yield Finding(
                "ZR618",
                f"no tensor of the model is large enough to be swapped by {world} processes",
                f"The largest part is {max(parts) * each:,} bytes; below {least:,} "
                "(swap_tensor/partitioned_param_swapper.py, swappable_tensor) parts stay in host memory.",
                "Nothing, for a trial; a model of this size needs no NVMe.",
                level="warning",
            )
    yield from _locked(run, sum(parts), host)
    needed = sum(swapped) * each if strategy.offload_param == "nvme" else 0
    needed += sum(swapped) * 16 if strategy.offload_optimizer == "nvme" else 0
    path = config.offload_block(config.on_nvme[0]).get("nvme_path")
    free = host.free_disk(path) if path and Path(path).is_dir() else None
    if free is not None and here * needed > free:
        yield Finding(
            "ZR619",
            f"the run swaps at least {units.size(here * needed)} to {path}, which has {units.size(free)} free",
            f"{here} processes with {units.size(needed)} each: parameters and their fp32 master, momentum, "
            "variance and gradient, written while the engine is built and again at every step.",
            "Another --nvme_path, more machines, or offload_param on the CPU.",
        )


def _locked(run: RunConfig, part: int, host: Host) -> Iterator[Finding]:
    """`part`: elements of one process's part of the model."""
    trained = 0 if run.settings.use_peft else part / 2  # of the Trainer's two groups one has half of them or more
    needed, limit = (
        sum(swap_buffers(run.strategy.ds_config, trained).values()),
        host.lockable(),
    )
    if needed > limit:
        yield Finding(
            "ZR655",
            f"each process locks at least {units.size(int(needed))} of swap buffers in memory, and may lock "
            f"{units.size(int(limit))}",
            "ulimit -l (RLIMIT_MEMLOCK) is too small, and CAP_IPC_LOCK is not there. DeepSpeed "
            '(ops/csrc/pin_memory/page_alloc.cpp) writes "mlock failed" and aborts (SIGABRT), once the model has been '
            "loaded.",
            "docker run --ulimit memlock=-1 (or --cap-add IPC_LOCK); elsewhere ulimit -l unlimited, or memlock in "
            "/etc/security/limits.conf; a pod that allows neither takes offload to the CPU.",
        )


def _buffers(block: Mapping, parts: list[int], swapped: list[int]) -> Iterator[Finding]:
    size = number_in(block, "buffer_size", DEFAULT_BUFFER)
    kept = number_in(block, "max_in_cpu", DEFAULT_MAX_IN_CPU)
    if swapped and size < max(swapped):
        yield Finding(
            "ZR620",
            f"offload_param.buffer_size {size:,} is smaller than a tensor's part of {max(swapped):,} elements",
            'swap_tensor/partitioned_param_swapper.py, get_buffer stops on it while the model is loaded: "More '
            'elements than buffer size".',
            f'Write "buffer_size": "auto" (zero-recipes fills in {max(swapped)}).',
        )
    if swapped and kept >= sum(parts):
        yield Finding(
            "ZR621",
            f"offload_param.max_in_cpu {kept:,} keeps all parameters in host memory",
            f"Each process has {sum(parts):,} elements of them, and zero/stage3.py "
            "(_create_param_groups_fp16_flat_cpu_memory) brings that many back from the disk for good.",
            'Write "max_in_cpu": 0, or "device": "cpu".',
            level="warning",
        )
