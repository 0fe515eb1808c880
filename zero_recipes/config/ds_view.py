"""A DeepSpeed configuration by its meaning: which stage, what lies elsewhere, what ZeRO++ compresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_SWAPPED = 2**20  # bytes: swap_tensor/utils.py, MIN_AIO_BYTES (or aio.block_size, if that is more)
OFFLOADS = ("offload_optimizer", "offload_param")
AUTOCAST_DTYPES = {name: "bf16" for name in ("bf16", "bfloat16", "torch.bfloat16")}
AUTOCAST_DTYPES |= {name: "fp16" for name in ("fp16", "half", "float16", "torch.float16")}


def number_in(block: Mapping[str, Any], key: str, default: int) -> int:
    """What is written there, 1e9 included; the default for "auto" and what else DeepSpeed itself will refuse."""
    value = block.get(key, default)
    return int(value) if isinstance(value, (int, float)) else default


@dataclass(frozen=True)
class DsConfig:
    """A typed view of one DeepSpeed configuration, which `raw` holds as it was written ("auto" values included)."""

    raw: Mapping[str, Any]

    @property
    def zero(self) -> Mapping[str, Any]:
        """The zero_optimization block; empty where there is none."""
        return self.raw.get("zero_optimization") or {}

    @property
    def stage(self) -> int:
        return self.zero.get("stage", 0)

    def offload_block(self, key: str) -> Mapping[str, Any]:
        """The block of one of OFFLOADS; empty where there is none."""
        return self.zero.get(key) or {}

    def offload_device(self, key: str) -> str | None:
        """Where one of OFFLOADS lies: "cpu", "nvme", or None for the device that trains."""
        named = self.offload_block(key).get("device")
        return None if named in (None, "none") else named

    @property
    def offload_optimizer(self) -> str | None:
        """Where the optimizer's states lie: "cpu", "nvme", or None for the device that trains."""
        return self.offload_device("offload_optimizer")

    @property
    def offload_param(self) -> str | None:
        """Where the parameters lie: "cpu", "nvme", or None for the device that trains."""
        return self.offload_device("offload_param")

    @property
    def offloads(self) -> bool:
        return bool(self.offload_optimizer or self.offload_param)

    @property
    def on_nvme(self) -> tuple[str, ...]:
        """Those of OFFLOADS that swap to NVMe."""
        return tuple(key for key in OFFLOADS if self.offload_device(key) == "nvme")

    @property
    def nvme_paths(self) -> list[str]:
        """The folders swapped to, each once, in the order of OFFLOADS."""
        return list(dict.fromkeys(self.offload_block(key)["nvme_path"] for key in self.on_nvme))

    @property
    def hpz_partition_size(self) -> int | str:
        """ZeRO++'s second partition: processes that share one more copy of the parameters; 1 without, or "auto"."""
        return self.zero.get("zero_hpz_partition_size", 1)

    @property
    def quantizes_weights(self) -> bool:
        return bool(self.zero.get("zero_quantized_weights"))

    @property
    def quantizes_gradients(self) -> bool:
        return bool(self.zero.get("zero_quantized_gradients"))

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """The optimizer block, which then counts instead of the recipe's keys."""
        return self.raw.get("optimizer")

    @property
    def aio(self) -> Mapping[str, Any]:
        return self.raw.get("aio") or {}

    @property
    def grad_accum_dtype(self) -> str | None:
        return (self.raw.get("data_types") or {}).get("grad_accum_dtype")

    @property
    def bf16_masters(self) -> bool:
        """Whether the master weights are kept in bf16, and not in fp32."""
        return bool((self.raw.get("bf16") or {}).get("bf16_master_weights_and_grads"))

    @property
    def bf16_states(self) -> bool:
        """Whether the optimizer's states are kept in bf16 too."""
        return bool((self.raw.get("bf16") or {}).get("bf16_optimizer_states"))

    @property
    def adam_bytes(self) -> int:
        """Per trained parameter in 16-bit training: the master weight, and Adam's momentum and variance."""
        return (2 if self.bf16_masters else 4) + (4 if self.bf16_states else 8)

    @property
    def autocast(self) -> str | None:
        """ "bf16" or "fp16", in which torch.autocast computes with fp32 weights; None without torch_autocast."""
        block = self.raw.get("torch_autocast") or {}
        return AUTOCAST_DTYPES.get(str(block.get("dtype")).lower(), "bf16") if block.get("enabled") else None

    @property
    def name(self) -> str:
        """ "zero0" ... "zero3", then "_infinity" where states lie on NVMe, "_offload" where they lie in host memory
        ("_offload_infinity": one each), "_bf16_states" or "_bf16_masters", "_autocast", and ZeRO++'s parts: "_hpz",
        "_qwz", "_qgz", for all three "_plus_plus"."""
        kept = "_offload" if any(self.offload_device(key) == "cpu" for key in OFFLOADS) else ""
        kept += "_infinity" if self.on_nvme else ""
        kept += "_bf16_states" if self.bf16_states else "_bf16_masters" if self.bf16_masters else ""
        kept += "_autocast" if self.autocast else ""
        parts = ["_hpz"] if self.hpz_partition_size != 1 else []
        parts += ["_qwz"] if self.quantizes_weights else []
        parts += ["_qgz"] if self.quantizes_gradients else []
        return f"zero{self.stage}{kept}" + ("_plus_plus" if len(parts) == 3 else "".join(parts))
