"""Checks of ZeRO-Infinity against the model: room on the disk, buffers that fit, and whether anything swaps at all.

File names are those of DeepSpeed 0.19.8, under deepspeed/runtime/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero_recipes.checks.lower_bounds import swap_buffers
from zero_recipes.config.ds_config import LEAST_SWAPPED, number_in
from zero_recipes.config.run import RunConfig
from zero_recipes.core import units
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host

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
            yield finding("ZR618", world=world, parts=max(parts) * each, least=least)
    yield from _locked(run, sum(parts), host)
    needed = sum(swapped) * each if strategy.offload_param == "nvme" else 0
    needed += sum(swapped) * 16 if strategy.offload_optimizer == "nvme" else 0
    path = config.offload_block(config.on_nvme[0]).get("nvme_path")
    free = host.free_disk(path) if path and Path(path).is_dir() else None
    if free is not None and here * needed > free:
        yield finding(
            "ZR619",
            size=units.size(here * needed),
            path=path,
            size_2=units.size(free),
            here=here,
            size_3=units.size(needed),
        )


def _locked(run: RunConfig, part: int, host: Host) -> Iterator[Finding]:
    """`part`: elements of one process's part of the model."""
    trained = 0 if run.settings.use_peft else part / 2  # of the Trainer's two groups one has half of them or more
    needed, limit = (
        sum(swap_buffers(run.strategy.ds_config, trained).values()),
        host.lockable(),
    )
    if needed > limit:
        yield finding("ZR655", size=units.size(int(needed)), size_2=units.size(int(limit)))


def _buffers(block: Mapping, parts: list[int], swapped: list[int]) -> Iterator[Finding]:
    size = number_in(block, "buffer_size", DEFAULT_BUFFER)
    kept = number_in(block, "max_in_cpu", DEFAULT_MAX_IN_CPU)
    if swapped and size < max(swapped):
        yield finding("ZR620", size=size, swapped=max(swapped))
    if swapped and kept >= sum(parts):
        yield finding("ZR621", kept=kept, sum=sum(parts))
