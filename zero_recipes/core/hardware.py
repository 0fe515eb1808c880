"""The GPUs that a plan and a measured MFU know: hardware.yaml, and for a plan a user's file in the same form.

Every figure has its source there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_recipes.core.findings import refusal

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
