"""Cases of ZeRO's family for tests/helpers/group.py: NVMe, ZeRO++."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from deepspeed import comm
from deepspeed.ops import op_builder
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from deepspeed.utils import groups

from tests.helpers import quantizer_on_cpu
from tests.helpers.around import before
from tests.helpers.cases import refusal_of, train
from tests.helpers.unchecked import without_rules
from zero_recipes.checkpoint.output_dir import SWAPPED
from zero_recipes.libs.patches import patch_quantized_gradients
from zero_recipes.metrics.callback import StageMetricsCallback


def train_and_look_at_swap_files(argv: list[str], disk: str) -> dict:
    """`train`, with {file below DeepSpeed's swap folder: bytes} when the last step had ended, the bytes that are
    reserved to write parameters, and the output folder."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    reserve, seen, reserved, root = Swapper.reserve_partitioned_swap_space, {}, [], Path(disk) / SWAPPED

    def look(_) -> None:
        seen.update({str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()})

    def see(self, sizes) -> None:
        reserve(self, sizes)
        reserved.append(self.partitioned_swap_buffer.nbytes)

    found = {"swapped": seen, "reserved": reserved, "output_dir": argv[argv.index("--output_dir") + 1]}
    seeing = mock.patch.object(Swapper, "reserve_partitioned_swap_space", see)
    with seeing, before(StageMetricsCallback, "end_steps", look):
        return train(argv) | found


def failure_of(argv: list[str]) -> str:
    """The error that a run ends with, its combinations unchecked."""
    try:
        with without_rules():
            train(argv)
        return "no error"
    except Exception as error:
        return str(error)


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """Four processes stand for two nodes of two, with the quantizer of quantizer_on_cpu.py."""
    # LOCAL_SIZE: what DeepSpeed's CPU accelerator counts as the devices of a node
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    groups._ALL_TO_ALL_GROUP.clear()
    builder = SimpleNamespace(load=lambda: quantizer_on_cpu)
    with (
        mock.patch.object(op_builder, "QuantizerBuilder", lambda: builder),
        mock.patch.object(CUDAQuantizer, "quantizer_cuda_module", None),
        mock.patch.object(coalesced_collectives, "quantizer_module", quantizer_on_cpu),
        without_rules("quantized_communication_on_cpu"),
    ):
        yield


def train_on_two_nodes(argv: list[str]) -> dict:
    with two_nodes():
        return train(argv)


def refusal_on_two_nodes(argv: list[str]) -> str:
    with two_nodes():
        return refusal_of(argv)


def quantized_ranges(magnitudes: list[float], seed: int) -> dict:
    """qgZ's relative error against fp64, {dtype: {root mean square: [before, after]}}, and what infinities become.

    "before": cast to fp16 without a scale. A matrix a magnitude and rank, four ranks that stand for two nodes of two.
    """
    os.environ["LOCAL_SIZE"] = "2"
    groups._ALL_TO_ALL_GROUP.clear()
    pairs = groups._get_local_all_to_all_group()
    patch_quantized_gradients()
    scaled, faulty = stage3.all_to_all_quant_reduce, stage3.all_to_all_quant_reduce.unpatched
    rank, world = comm.get_rank(), comm.get_world_size()
    draw = torch.Generator().manual_seed(seed + rank)

    def unscaled(tensors, pairs):
        found = faulty([t.div(2).half() for t in tensors], pairs)
        return [out.to(t.dtype) for out, t in zip(found, tensors, strict=True)]

    found: dict = {"errors": {}}
    with mock.patch.object(coalesced_collectives, "quantizer_module", quantizer_on_cpu):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            errors = found["errors"][str(dtype).removeprefix("torch.")] = {}
            # ranks whose gradients differ in size, as those of uneven micro batches do
            drawn = [torch.randn(64, 128, generator=draw, dtype=torch.float64) * m * (rank + 1) for m in magnitudes]
            given = [t.to(dtype) for t in drawn]
            kept = [t.clone() for t in given]
            means = [t.double() for t in given]
            for mean in means:
                comm.all_reduce(mean)
            before, after = unscaled([t.clone() for t in given], pairs), scaled(given, pairs)
            assert all(map(torch.equal, given, kept)), "the gradients are left as they are"
            for magnitude, mean, *results in zip(magnitudes, means, before, after, strict=True):
                wanted = (mean / world).view(-1).chunk(world)[rank]
                gaps = [((got.double().view(-1) - wanted).norm() / wanted.norm()).item() for got in results]
                errors[f"{magnitude:g}"] = [gap if gap == gap else float("inf") for gap in gaps]
        for name in ("inf", "-inf", "nan"):
            one = torch.randn(64, 128, generator=draw, dtype=torch.bfloat16)
            if rank == 2:
                one[5, 7] = float(name)
            whole = torch.randn(64, 128, generator=draw, dtype=torch.bfloat16)
            spoiled, clean = scaled([one, whole], pairs)
            found[name] = [bool(spoiled.isfinite().any()), bool(clean.isfinite().all())]
    return found
