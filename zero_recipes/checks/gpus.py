"""Checks of the GPUs of this machine: whether torch has kernels for them, and how they reach each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.errors import Finding

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
            yield Finding(
                "ZR640",
                f"GPU {number} ({torch.cuda.get_device_name(number)}) has compute capability {written}, and torch "
                f"{torch.__version__} has kernels for {', '.join(built)}",
                'Its first kernel would fail with "no kernel image is available for execution on the device". Each '
                "wheel of torch is built for the cards of its CUDA version (torch.cuda.get_arch_list).",
                "Install torch from the index of another CUDA version (pytorch.org/get-started/locally): a newer one "
                "for a newer card, cu126 for Maxwell, Pascal and Volta; or take another GPU.",
            )


def bf16_findings(device: str, precision: str) -> Iterator[Finding]:
    """A card without bf16: torch emulates it and says that it is supported (torch.cuda.is_bf16_supported)."""
    import torch

    if device != "cuda" or torch.version.cuda is None or precision != "bf16":
        return
    cards = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
    for number, capability in enumerate(cards):
        if capability < BF16_FROM:
            yield Finding(
                "ZR272",
                f"bf16 on GPU {number} ({torch.cuda.get_device_name(number)}), of compute capability "
                f"{'.'.join(map(str, capability))}",
                "bf16 begins at 8.0 (A100, RTX 30). Below, torch emulates it without tensor cores, many times slower "
                "than fp16; Triton's kernels, which TRL's loss is computed by, may not compile at all.",
                "Set bf16: false and fp16: true, as recipes/pythia-410m-fp16.yaml does, or take another GPU.",
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
        yield Finding(
            "ZR616",
            "RTX 40 cards with a driver before 550.40.07, and NCCL_P2P_DISABLE and NCCL_IB_DISABLE are not set",
            "accelerate (state.py, `check_cuda_p2p_ib_support`) stops with a NotImplementedError: these drivers "
            "promise peer access that the cards do not have, and NCCL hangs.",
            "export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1, a newer driver, or accelerate launch, which sets both.",
        )
    apart = [f"{a}-{b}" for a in range(here) for b in range(a + 1, here) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        yield Finding(
            "ZR617",
            f"no peer access between the GPUs {', '.join(apart[:4])}{' ...' if len(apart) > 4 else ''}",
            "NCCL copies between them through host memory and /dev/shm: right, but slower the more a stage "
            "communicates (stage 3 most).",
            "Nothing to do on cards without it (RTX 40 and most consumer cards); if NCCL hangs, NCCL_P2P_DISABLE=1. In "
            "a virtual machine, PCIe ACS or an IOMMU can be the cause (NCCL's documentation, troubleshooting).",
            level="warning",
        )


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
        yield Finding(
            "ZR268",
            f"zero_quantized_gradients with {here} processes on a machine that shows {visible} GPUs",
            "DeepSpeed 0.19.8 (utils/groups.py, _get_local_all_to_all_group; runtime/comm/coalesced_collectives.py, "
            "all_to_all_quant_reduce) takes the GPUs that a machine shows for its processes: gradients go unquantized, "
            "its groups span machines, or it stops on an assertion.",
            f"Make {here} GPUs visible on each machine (CUDA_VISIBLE_DEVICES), or start with {launch}.",
        )
    if "CUDA_VISIBLE_DEVICES" in environment:
        return
    idle = visible - here - _busy_gpus()
    if idle > 0:
        yield Finding(
            "ZR354",
            f"{idle} of {visible} GPUs stay idle: {here} process{'es' if here > 1 else ''} on this machine",
            "Each process takes one GPU.",
            f"accelerate launch --config_file FILE {launch} run_sft.py RECIPE.yaml takes all; CUDA_VISIBLE_DEVICES "
            "says that fewer are meant.",
            level="warning",
        )


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
