"""An output folder that is safe to write into, and a saved model that is whole."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from zero_recipes.refusal import Refusal
from zero_recipes.resuming import clear_unfinished, resumes_in

RESULTS = ("metrics.json", "samples.jsonl", "recipe.resolved.yaml")


def refuse_occupied(output_dir: Path, resume: object, overwrite: bool) -> None:
    """Refuse a folder that holds what an earlier run saved, unless the recipe resumes it or overwrites it."""
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise Refusal(
            f"output_dir {output_dir} cannot be made", f"{existing} is a file.", "Choose another --output_dir."
        )
    found = saved_in(output_dir)
    if not found or overwrite or resumes_in(output_dir, resume):
        return
    raise Refusal(
        f"{output_dir} already holds {', '.join(path.name for path in found[:4])}{' ...' if len(found) > 4 else ''}",
        "An earlier run saved it; training into the same folder would mix or destroy it. Nothing has been touched.",
        "Go on from its last checkpoint with --resume_from_checkpoint true, begin anew with --overwrite true (deletes "
        "the above), or choose another --output_dir.",
    )


def saved_in(output_dir: Path) -> list[Path]:
    """Checkpoints, weights and finished measurements in a folder."""
    if not output_dir.is_dir():
        return []
    checkpoints = sorted(p for p in output_dir.glob("checkpoint-*") if p.is_dir())
    weights = sorted(p for pattern in ("*.safetensors", "pytorch_model*.bin") for p in output_dir.glob(pattern))
    metrics = output_dir / "metrics.json"
    finished = metrics.is_file() and json.loads(metrics.read_text()).get("status") == "ok"
    return checkpoints + weights + ([metrics] if finished else [])


def clear_earlier_run(output_dir: Path, overwrite: bool) -> None:
    """Remove traces of an earlier run: its failure files and unfinished checkpoints, under `overwrite` all it saved."""
    clear_unfinished(output_dir)
    doomed = list(output_dir.glob("failure.rank*.json"))
    if overwrite:
        doomed += saved_in(output_dir) + [output_dir / name for name in RESULTS]
        doomed += list(output_dir.glob("*.safetensors.index.json"))
    for path in doomed:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class NotWhole(Exception):
    """A saved model that lacks weights. Raised after training, so it is no Refusal."""


def verify(folder: Path) -> dict[str, int]:
    """Compare a saved model's safetensors headers with the model class, built on the meta device: no weight is read.

    transformers itself matches the names (its renamings and ignore patterns included), so that what is missing here is
    what from_pretrained would invent. Only tied weights may be absent. An adapter is checked for emptiness.
    Returns {"tensors": count, "parameters": elements, "bytes": size of the weights}. Raises NotWhole.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    adapter = folder / "adapter_model.safetensors"
    header = _read_headers([adapter] if adapter.is_file() else sorted(folder.glob("model*.safetensors")))
    empty = sorted(name for name, entry in header.items() if 0 in entry["shape"])
    if not header or empty:
        raise NotWhole(
            f"{folder} holds no whole model: "
            + (f"{empty[0]} is empty ({len(empty)} in all)" if empty else "no weights")
            + ". Under ZeRO stage 3 a save without stage3_gather_16bit_weights_on_model_save writes empty tensors."
        )
    if not adapter.is_file():
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        _, report = AutoModelForCausalLM.from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True
        )
        if bars:
            logging.enable_progress_bar()
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[problem]:
                names = sorted(map(str, report[problem]))
                raise NotWhole(
                    f"{folder} is not whole: {problem.replace('_', ' ')} {', '.join(names[:3])} ({len(names)} in all). "
                    "from_pretrained would fill them with random numbers."
                )
    elements = [_product(entry["shape"]) for entry in header.values()]
    size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    return {"tensors": len(header), "parameters": sum(elements), "bytes": size}


def _read_headers(files: list[Path]) -> dict[str, dict]:
    """{tensor name: {"dtype", "shape", "data_offsets"}} of all files: 8 bytes of length, then JSON."""
    merged: dict[str, dict] = {}
    for path in files:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise NotWhole(
                f"{path} is cut off: {path.stat().st_size:,} bytes instead of {8 + length + end:,}. The disk was full "
                "or the process was killed while it was written."
            )
        merged |= header
    return merged


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
