"""Cases for tests/helpers/group.py: NVMe, ZeRO++, FSDP2, Ulysses, weights in 4 bit."""

import contextlib
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch
from accelerate.utils import fsdp_utils
from deepspeed import comm
from deepspeed.ops import op_builder
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from deepspeed.utils import groups

import run_sft
from tests.helpers import quantizer_on_cpu
from tests.helpers.cases import train
from tests.helpers.tools import before, without, without_rules
from zero_recipes.engine import fsdp
from zero_recipes.engine.deepspeed import packed_weights
from zero_recipes.engine.faults import fp32_parameters, fsdp_rounded_loss, quantized_gradients
from zero_recipes.engine.nvme import SWAPPED
from zero_recipes.metrics.callback import StageMetricsCallback


def train_and_look_at_swap_files(argv: list[str], disk: str, left_out: str | None = None) -> dict:
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
        return train(argv, left_out) | found


def train_on_two_nodes(argv: list[str]) -> dict:
    """`train`, where four processes stand for two nodes of two, with the quantizer of quantizer_on_cpu.py."""
    # LOCAL_SIZE: what DeepSpeed's CPU accelerator counts as the devices of a node
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    groups._ALL_TO_ALL_GROUP.clear()
    builder = SimpleNamespace(load=lambda: quantizer_on_cpu)
    with (
        mock.patch.object(op_builder, "QuantizerBuilder", lambda: builder),
        mock.patch.object(CUDAQuantizer, "quantizer_cuda_module", None),
        mock.patch.object(coalesced_collectives, "quantizer_module", quantizer_on_cpu),
        without_rules("ZR2004"),
    ):
        return train(argv)


def quantized_ranges(magnitudes: list[float], seed: int) -> dict:
    """qgZ's relative error against fp64, {dtype: {root mean square: [before, after]}}, and what infinities become.

    "before": cast to fp16 without a scale. A matrix a magnitude and rank, four ranks that stand for two nodes of two.
    """
    os.environ["LOCAL_SIZE"] = "2"
    groups._ALL_TO_ALL_GROUP.clear()
    pairs = groups._get_local_all_to_all_group()
    quantized_gradients.apply()
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
            drawn = [torch.randn(256, 256, generator=draw, dtype=torch.float64) * m * (rank + 1) for m in magnitudes]
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
            one = torch.randn(256, 256, generator=draw, dtype=torch.bfloat16)
            if rank == 2:
                one[5, 7] = float(name)
            whole = torch.randn(256, 256, generator=draw, dtype=torch.bfloat16)
            spoiled, clean = scaled([one, whole], pairs)
            found[name] = [bool(spoiled.isfinite().any()), bool(clean.isfinite().all())]
    return found


def train_as_accelerate(argv: list[str]) -> dict:
    """`train` under accelerate's own mixed precision."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    with mock.patch.object(fsdp_rounded_loss, "MixedPrecisionPolicy", lambda **_: plugin.mixed_precision_policy):
        return train(argv)


def gathered_after_evaluation(argv: list[str]) -> dict[str, list[str]]:
    """Parameters that an evaluation leaves gathered, and those that are so once `reshard` was called."""
    from torch.distributed.tensor import DTensor

    trainer = run_sft.train(run_sft.read_run(argv))

    def gathered() -> list[str]:
        return [name for name, p in trainer.model.named_parameters() if not isinstance(p, DTensor)]

    trainer.evaluate()
    before = gathered()
    fsdp.reshard_model(trainer.model)
    return {"before": before, "after": gathered()}


def train_with_a_mean_for_each_micro_batch(argv: list[str]) -> dict:
    """`train`, with the loss left to transformers and TRL."""
    from trl import SFTTrainer

    from zero_recipes.training.trainer import ZeroSFTTrainer

    left_to_trl = mock.patch.object(ZeroSFTTrainer, "compute_loss", SFTTrainer.compute_loss)
    counts = before(ZeroSFTTrainer, "train", lambda self, *_: setattr(self, "model_accepts_loss_kwargs", False))
    with left_to_trl, counts:
        return train(argv)


def train_quantised(argv: list[str], left_out: str | None = None) -> dict:
    """`train` over quantised weights, and what became of them on this rank."""
    kept = []
    with before(StageMetricsCallback, "on_train_end", lambda *_, model, **__: kept.append(model)):
        result = train(argv, left_out)
    packed = list(packed_weights(kept[0]))
    here = [fsdp.local(getattr(weight, "ds_tensor", weight)).untyped_storage() for weight, _ in packed]
    return result | {
        "packed": len(packed),
        "repacked": any(getattr(state, "packing_format_for_cpu", False) for _, state in packed),
        "packed_bytes_here": sum(storage.nbytes() for storage in here),
        "packed_sha256": sha256_of([weight for weight, _ in packed]),
    }


def sha256_of(weights: list) -> str:
    """Of all bits of these parameters, whole. Collective where they are shared out."""
    digest = hashlib.sha256()
    for weight in weights:
        gathered = deepspeed.zero.GatheredParameters(weight) if hasattr(weight, "ds_id") else contextlib.nullcontext()
        with gathered:
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            digest.update(whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_as_deepspeed_casts(argv: list[str]) -> dict:
    """`train` with every parameter in the training dtype, whatever the model's class keeps in fp32."""
    with mock.patch.object(fp32_parameters, "fp32_parameters", lambda *_: ()):
        return train(argv)


def train_as_accelerate_groups(argv: list[str]) -> dict:
    """`train` under FSDP2 without the final norm of a model inside an adapter."""
    find = getattr(fsdp_utils._find_final_norm, "unpatched", fsdp_utils._find_final_norm)
    left_out = without("zero_recipes.engine.faults.fsdp_head_of_an_adapter.apply")
    with left_out, mock.patch.object(fsdp_utils, "_find_final_norm", find):
        return train(argv)
