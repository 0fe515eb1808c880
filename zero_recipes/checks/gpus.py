"""Checks of the GPUs of this machine: whether torch has kernels for them, and how they reach each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding

BF16_FROM = (8, 0)  # NVIDIA's CUDA programming guide, compute capabilities: arithmetic by data type
BUSY_MIB = 1024  # more than a driver and a display take


def capability_findings(device: str) -> Iterator[Finding]:
    """A card that the installed torch has no kernels for: its first kernel would end the run, weights loaded."""
    import torch

    if device != "cuda" or torch.version.cuda is None:  # ROCm names its cards otherwise
        return
    built = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        if built and not has_kernels(capability, built):
            written = ".".join(map(str, capability))
            yield finding(
                "ZR640",
                number=number,
                get_device_name=torch.cuda.get_device_name(number),
                written=written,
                version=torch.__version__,
                built=", ".join(built),
            )


def bf16_findings(device: str, precision: str) -> Iterator[Finding]:
    """A card without bf16: torch emulates it and says that it is supported (torch.cuda.is_bf16_supported)."""
    import torch

    if device != "cuda" or torch.version.cuda is None or precision != "bf16":
        return
    cards = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
    for number, capability in enumerate(cards):
        if capability < BF16_FROM:
            yield finding(
                "ZR272",
                number=number,
                get_device_name=torch.cuda.get_device_name(number),
                capability=".".join(map(str, capability)),
            )
            return  # one card is enough: all ranks compute alike


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether code for one of `built` runs on a card: "sm_80" on 8.x from 8.0 on, "compute_80" (PTX) on all from 8.0.

    NVIDIA's CUDA programming guide, compute capabilities: "sm_90a" runs on 9.0 alone, "sm_100f" within its family.
    """
    for name in built:
        kind, number, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name).groups()
        least = divmod(int(number), 10)
        if suffix == "a":
            runs = capability == least
        elif kind == "sm" or suffix == "f":
            runs = capability[0] == least[0] and capability >= least
        else:
            runs = capability >= least
        if runs:
            return True
    return False


def peer_findings(device: str, here: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """GPUs that cannot read each other's memory, and cards on which accelerate stops.

    Asks CUDA, so it is called on one rank of a machine alone.
    """
    import torch

    if device != "cuda" or here < 2 or environment.get("NCCL_P2P_DISABLE") == "1":
        return
    if "RANK" in environment and _accelerate_stops(environment):
        yield finding("ZR616")
    apart = [f"{a}-{b}" for a in range(here) for b in range(a + 1, here) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        yield finding("ZR617", apart=", ".join(apart[:4]), what=" ..." if len(apart) > 4 else "")


def count_findings(strategy: Strategy, device: str, here: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """GPUs of this machine that no process of the run takes: `here` processes run on it, one on each."""
    import torch

    visible = torch.cuda.device_count() if device == "cuda" else here
    if visible <= here:
        return
    machines = -(-strategy.world_size // here)
    launch = f"--num_processes {visible * machines}"
    config = strategy.ds_config
    if config is not None and config.stage == 3 and config.quantizes_gradients and strategy.world_size > here:
        yield finding("ZR268", here=here, visible=visible, launch=launch)
    if "CUDA_VISIBLE_DEVICES" in environment:
        return
    idle = visible - here - _busy_gpus()
    if idle > 0:
        yield finding("ZR354", idle=idle, visible=visible, here=here, what="es" if here > 1 else "", launch=launch)


def _busy_gpus() -> int:
    """GPUs with memory in use by others, as nvidia-smi has it; 0 where it cannot be asked."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(used.strip().isdigit() and int(used) > BUSY_MIB for used in said.splitlines())


def _accelerate_stops(environment: Mapping[str, str]) -> bool:
    from accelerate.utils import check_cuda_p2p_ib_support

    disabled = "NCCL_P2P_DISABLE" in environment and "NCCL_IB_DISABLE" in environment
    return not disabled and not check_cuda_p2p_ib_support()
