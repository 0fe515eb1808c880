"""Cases of tests/engine/test_qlora.py, run by the workers of tests/helpers/group.py."""

import contextlib
import hashlib
from unittest import mock

import run_sft
from zero_recipes.libs import patches
from zero_recipes.libs.deepspeed import packed_weights


def train(argv: list[str], dtypes_kept: bool = True) -> dict:
    """One run over quantised weights: what was measured, and what became of the weights on this rank.

    `dtypes_kept`: with the patch of a resumed adapter's dtype.
    """
    import json

    off = contextlib.nullcontext()
    if not dtypes_kept:
        off = mock.patch.object(patches, "adapter_dtypes_kept", lambda _: contextlib.nullcontext())
    with off:
        run = run_sft.prepare(argv)
        trainer = run_sft.train(run)
    trainer.accelerator.wait_for_everyone()  # rank 0 writes the files
    packed = list(packed_weights(trainer.model))
    return {
        "metrics": json.loads((run.output_dir / "metrics.json").read_text()),
        "packed": len(packed),
        "repacked": any(getattr(state, "packing_format_for_cpu", False) for _, state in packed),
        "packed_bytes_here": sum(bytes_here(weight) for weight, _ in packed),
        "packed_sha256": sha256_of([weight for weight, _ in packed]),
    }


def bytes_here(weight) -> int:
    """Of a parameter's memory on this rank, between two steps."""
    from zero_recipes.libs.fsdp import local

    return local(getattr(weight, "ds_tensor", weight)).untyped_storage().nbytes()


def sha256_of(weights: list) -> str:
    """Of all bits of these parameters, whole. Collective where they are shared out."""
    import deepspeed
    import torch

    digest = hashlib.sha256()
    for weight in weights:
        gathered = deepspeed.zero.GatheredParameters(weight) if hasattr(weight, "ds_id") else contextlib.nullcontext()
        with gathered:
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            digest.update(whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
