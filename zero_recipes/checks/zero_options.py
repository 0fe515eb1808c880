"""Options of DeepSpeed that do not go together: hpZ, quantized communication, NVMe, races, what is not to be trusted.

File names are those of DeepSpeed 0.19.8, under deepspeed/. Issues are deepspeedai/DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from zero_recipes.config.ds_config import NVME_PATH, DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding


def quantized_weight_findings(strategy: Strategy, sizes: Sequence[int]) -> Iterator[Finding]:
    """`sizes`: elements of each tensor of the model."""
    config = strategy.ds_config
    odd = [size for size in sizes if -(-size // strategy.world_size) % 8]
    if config is not None and config.quantizes_weights and config.stage == 3 and odd:
        yield finding("ZR221", odd=_listed(odd), world_size=strategy.world_size)


def _listed(sizes: Sequence[int]) -> str:
    distinct = sorted(set(sizes))
    return ", ".join(f"{size:,}" for size in distinct[:3]) + (" ..." if len(distinct) > 3 else "")


PREFETCH = 50_000_000  # elements: DeepSpeed's default of stage3_prefetch_bucket_size (runtime/zero/config.py)
# overlap_comm at stages 1 and 2: (fixed in, torch_compile only, what went wrong)
RACES = (
    (
        "0.19.0",
        False,
        "Buffers are freed while the reduction stream still reads them; ZeRO-2 went to nan in the third step (#7965).",
    ),
    (
        "0.19.3",
        True,
        "Compiled backward passes fill a bucket from several streams, the reduction waits for one: nan from the first "
        "step (#8061, fixed by #8080).",
    ),
)


def zero_option_findings(
    config: DsConfig,
    settings: Settings,
    world_size: int,
    local_world_size: int,
    device: str,
    deepspeed_version: str,
) -> list[Finding]:
    """All findings about the options of one ds_config.

    `settings`: the recipe's keys in force; `local_world_size`: the processes on this node.
    """
    return [
        *_hpz(config, world_size, local_world_size),
        *_quantized_communication(config, world_size, local_world_size, device),
        *_nvme(config, settings),
        *_races(config.zero, settings, deepspeed_version),
        *_accumulation_dtype(config, settings),
        *_muon(config),
        *_not_to_be_trusted(config, device),
        *_compiled(config, settings),
    ]


def _hpz(config: DsConfig, world_size: int, local_world_size: int) -> Iterator[Finding]:
    size = config.hpz_partition_size
    if size <= 1 or config.stage != 3:
        return
    group = min(size, world_size)  # utils/groups.py does the same
    here = f"zero_hpz_partition_size {size}"
    remove = "Remove zero_hpz_partition_size"
    if world_size % group:
        yield finding("ZR222", here=here, world_size=world_size)
    elif group == world_size:
        yield finding("ZR223", here=here, world_size=world_size, remove=remove)
    elif local_world_size >= world_size:
        yield finding("ZR224", here=here, size=size, world_size=world_size, remove=remove)
    offloaded = [k for k in ("offload_param", "offload_optimizer") if config.offload_device(k)]
    if offloaded:
        yield finding("ZR225", here=here, offloaded=" and ".join(offloaded), remove=remove)


def _quantized_communication(
    config: DsConfig, world_size: int, local_world_size: int, device: str
) -> Iterator[Finding]:
    zero = config.zero
    requested = [k for k in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(k)]
    if not requested:
        return
    named = " and ".join(requested)
    if zero.get("stage") != 3:
        yield finding("ZR226", named=named, stage=zero.get("stage", 0))
    elif device == "cpu":
        yield finding("ZR227", named=named)
    elif "zero_quantized_gradients" in requested and local_world_size >= world_size:
        yield finding("ZR228")


def _nvme(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    zero = config.zero
    on_nvme = [key for key in ("offload_param", "offload_optimizer") if key in config.on_nvme]
    if not on_nvme:
        return
    named = " and ".join(on_nvme)
    if config.stage != 3:
        yield finding("ZR229", named=named, stage=config.stage)
    if settings.saves_checkpoints:
        yield finding("ZR230", save_strategy=settings.save_strategy, named=named)
    prefetch = zero.get("stage3_prefetch_bucket_size", PREFETCH)
    if "offload_param" in on_nvme and prefetch != 0:
        yield finding("ZR231", prefetch=prefetch)
    for key in on_nvme:
        path = zero[key].get("nvme_path")
        if path == "auto":
            yield finding("ZR232", key=key, nvme_path=NVME_PATH)
        elif path is None or not Path(path).is_dir():
            yield finding(
                "ZR233",
                key=key,
                path=path,
                why="DeepSpeed would create it silently (runtime/swap_tensor/), on whatever disk, and fill it."
                if path
                else "runtime/zero/stage3.py and runtime/swap_tensor/ join it to a file name and stop on None.",
            )


def _races(zero: Mapping, settings: Settings, installed: str) -> Iterator[Finding]:
    if not zero.get("overlap_comm") or zero.get("stage") not in (1, 2):
        return
    for fixed_in, compiled_only, what in RACES:
        if Version(installed) < Version(fixed_in) and (settings.torch_compile or not compiled_only):
            yield finding(
                "ZR234",
                stage=zero["stage"],
                what=" with torch_compile" if compiled_only else "",
                installed=installed,
                what_2=what,
                fixed_in=fixed_in,
            )


def _accumulation_dtype(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    dtype = config.grad_accum_dtype
    if dtype and config.stage == 0 and dtype != settings.precision:
        yield finding("ZR235", dtype=dtype, precision=settings.precision)


def _muon(config: DsConfig) -> Iterator[Finding]:
    muon = str((config.optimizer or {}).get("type", "")).lower() == "muon"
    if muon and config.stage == 3 and config.zero.get("reduce_scatter", True):
        yield finding("ZR236")


def _not_to_be_trusted(config: DsConfig, device: str) -> Iterator[Finding]:
    raw, zero = config.raw, config.zero
    if (raw.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        yield finding("ZR237")
    if zero.get("zenflow"):
        yield finding("ZR238", stage=config.stage)
    if raw.get("pipeline"):
        yield finding("ZR239")
    if config.offload_block("offload_optimizer").get("super_offload") and device == "cpu":
        yield finding("ZR240")


def _compiled(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    if (config.raw.get("compile") or {}).get("deepcompile"):
        yield finding("ZR241")
    asks = [key for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode") if getattr(settings, key)]
    if asks and config.stage == 3:
        yield finding("ZR242", first_asks=asks[0])
