"""Several ranks of NCCL on one GPU, each with its own memory and collectives; one_gpu.sh starts them."""

from importlib import metadata
from pathlib import Path

from rich.console import Console

from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import Column, print_columns
from zero_recipes.core.units import size
from zero_recipes.metrics.schema import Metrics

PACKAGE = "nvidia-nccl-cu13"  # of the extra `rehearse`
FIRST = [2, 30]
SCRIPT = Path(__file__).with_suffix(".sh")


def nccl_library() -> Path:
    """Find an NCCL that lets ranks share a GPU. Raises Refusal where it is missing or too old."""
    found = "none"
    for package in metadata.distributions(name=PACKAGE):
        found = package.version
        if [int(number) for number in found.split(".")[:2]] >= FIRST:
            return Path(str(package.locate_file("nvidia/nccl/lib/libnccl.so.2")))
    raise refusal("ZR869", found=found)


def print_memory(metrics: Metrics, console: Console) -> None:
    """Each rank's peak beside the plan's, and what a step sends. Times mean nothing: the ranks share the card."""
    rows = [(f"rank {rank}", one and one.allocated) for rank, one in enumerate(metrics.peak_memory_bytes or [])]
    rows.append(("planned", metrics.predicted and metrics.predicted.peak_memory_bytes))
    rows += (metrics.communication_bytes_per_step or {}).items()
    columns = [Column("On one GPU", lambda row: row[0]), Column("Bytes", lambda row: size(row[1]))]
    print_columns(columns, [], rows, console)
