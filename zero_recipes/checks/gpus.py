"""Checks of how the GPUs of this machine reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zero_recipes.core.errors import Finding


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


def _accelerate_stops(environment: Mapping[str, str]) -> bool:
    from accelerate.utils import check_cuda_p2p_ib_support

    disabled = "NCCL_P2P_DISABLE" in environment and "NCCL_IB_DISABLE" in environment
    return not disabled and not check_cuda_p2p_ib_support()
