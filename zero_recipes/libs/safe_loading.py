"""Pickles that are read without running code: torch's own unpickler for weights, and the few classes that DeepSpeed,
numpy and transformers put into a checkpoint beside tensors.

DeepSpeed 0.19.8 loads its files with weights_only=False (runtime/checkpoint_engine/torch_checkpoint_engine.py): what
stands in them runs. transformers 5.23 loads its own with weights_only=True.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".metadata", ".distcp")
NEVER_LOADED = "training_args.bin"  # by a run or by transformers' resume; it is made of classes of these libraries
LIBRARIES = ("accelerate.", "deepspeed.", "torch.", "transformers.", "trl.", "peft.")
RUNS = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}


def load_without_code(path: Path) -> Any:
    """What torch.save wrote, its tensors mapped into memory. Raises what torch.load raises; pickle.UnpicklingError for
    whatever is neither data nor one of the known classes."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from transformers.trainer_pt_utils import safe_globals

    of_deepspeed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with safe_globals(), torch.serialization.safe_globals(of_deepspeed):
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def not_plain(path: Path) -> str | None:
    """Why a file cannot be read without running what stands in it; None if it can, or is no pickle by its name."""
    if not path.name.endswith(PICKLES):
        return None
    if path.name == NEVER_LOADED:
        foreign = [name for name in _globals(path) if not name.startswith(LIBRARIES)]
        return f"it asks for {foreign[0]}" if foreign else None
    try:
        load_without_code(path)
    except Exception as error:  # of any kind: the file is a stranger's
        lines = [line for line in str(error).splitlines() if re.search(r"GLOBAL|[Uu]nsupported|operand", line)]
        return (lines or [str(error) or type(error).__name__])[0].strip().rstrip(".")
    return None


def may_run_code(path: Path) -> str | None:
    """The same of a file that does hold instructions to run something: not of one that is merely damaged."""
    why = not_plain(path)
    return why if why is not None and RUNS & {name for name, _ in _operations(path)} else None


def _globals(path: Path) -> list[str]:
    """Names of what a pickle asks for, as "module.name"; "?" for one that is put together while it is read."""
    return [
        str(argument).replace(" ", ".") if name in ("GLOBAL", "INST") else "?"
        for name, argument in _operations(path)
        if name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
    ]


def _operations(path: Path) -> list[tuple[str, Any]]:
    """(name, argument) of a pickle's instructions, as far as they can be read; nothing of it is run."""
    found = []
    for data in _pickles(path):
        stream = io.BytesIO(data)
        try:
            while True:  # torch's old format is several pickles, one after another
                for operation, argument, _ in pickletools.genops(stream):
                    found.append((operation.name, argument))
        except Exception:  # the end, or damaged from here on; what came before it would have been run
            continue
    return found


def _pickles(path: Path) -> list[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return [path.read_bytes()] if path.is_file() else []
