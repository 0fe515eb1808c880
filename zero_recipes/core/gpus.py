"""The GPUs that a plan knows: those of hardware.yaml, with the source of every figure, and those of a user's file."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from zero_recipes.core.files import load_yaml
from zero_recipes.core.findings import refusal
from zero_recipes.core.library_errors import library_error_as_finding

FP32_SHARE = 1 / 16  # of the bf16 figure: A100 19.5 of 312, without TF32 (torch's default)
GPUS_OF_A_SERVER = 8
DESKTOP_GB = 128  # of host memory
OWN = Path(__file__).with_name("hardware.yaml")
Positive = Annotated[float, Field(gt=0)]


class Gpu(BaseModel):
    """One class of GPU. The names of its figures have their units; GB/s are 10^9 bytes per second and direction."""

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
    machine_memory_gb: Positive = 2000  # of a server with eight
    nvme_gb_s: Positive | None = None  # of each machine's disks; None: one drive, as in plan/times.yaml
    workspace_bytes: int = 8_519_680
    source: Annotated[str, Field(min_length=1)]

    @property
    def is_amd(self) -> bool:
        """Whether the card is AMD's, by its names. One without a name is taken for NVIDIA's."""
        return any(name.startswith("AMD ") for name in self.names)

    @property
    def memory_bytes(self) -> int:
        """The memory that nvidia-smi shows, in bytes."""
        return self.memory_mib * 1024**2

    def usual_host_bytes(self, count: int) -> int:
        """Host memory that usually comes with so many of these GPUs in one machine, in bytes.

        A part of a server comes with its share of the memory, but with that of a desktop at least.
        """
        share = self.machine_memory_gb * count / GPUS_OF_A_SERVER
        return int(1e9 * min(self.machine_memory_gb, max(DESKTOP_GB, share)))

    def peak_flops(self, precision: str) -> float:
        """The peak of dense matrix products in FLOP/s.

        `precision`: "bf16", "fp16", "fp32" or "tf32" (fp32's figure where the card has no TF32).
        """
        fp32 = self.fp32_tflops or self.bf16_tflops * FP32_SHARE
        if precision == "fp32":
            return fp32 * 1e12
        if precision == "tf32":
            return (self.tf32_tflops or fp32) * 1e12
        return self.bf16_tflops * 1e12


def gpus(extra: Path | None = None) -> dict[str, Gpu]:
    """Read the known GPUs by their names. `extra`: a file that adds to ours, or replaces them.

    Raises Refusal for a file with a fault.
    """
    paths = [OWN] if extra is None else [OWN, extra]
    known = {}
    for path in paths:
        with library_error_as_finding(f"reading {path}"):
            for key, row in load_yaml(path.read_text()).items():
                name = str(key).lower()
                known[name] = Gpu.model_validate({"name": name} | row)
    return known


def gpu_named(name: str, known: dict[str, Gpu]) -> Gpu:
    """Find the GPU of a name, or the only one whose name begins with it or contains it. Raises Refusal."""
    if name in known:
        return known[name]
    found = [gpu for key, gpu in known.items() if key.startswith(name.lower())]
    found = found or [gpu for key, gpu in known.items() if name.lower() in key]
    if len(found) == 1:
        return found[0]
    what = f"{' and '.join(gpu.name for gpu in found)} match" if found else "unknown GPU"
    raise refusal("ZR807", name=name, what=what, known=", ".join(known))


def card_named(device_name: str | None) -> Gpu | None:
    """Find the GPU that torch.cuda.get_device_name names; None if hardware.yaml does not have it."""
    return next((gpu for gpu in gpus().values() if device_name in gpu.names), None)


def peak_flops_of(device_name: str | None, precision: str) -> float | None:
    """The peak of the card of this name in dense FLOP/s; None if it is not known."""
    card = card_named(device_name)
    return card and card.peak_flops(precision)
