"""Pickles that are read without running code: torch's own unpickler for weights, and the few classes that DeepSpeed,
numpy and transformers put into a checkpoint beside tensors.

DeepSpeed 0.19.8 loads its files with weights_only=False (runtime/checkpoint_engine/torch_checkpoint_engine.py): code in
them runs. transformers 5.23 loads its own with weights_only=True.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".metadata", ".distcp")
NEVER_LOADED = "training_args.bin"  # by a run or by transformers' resume
REFUSED = re.compile(r"[Uu]nsupported|WeightsUnpickler error")  # messages of torch/_weights_only_unpickler.py


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
    """Why a file cannot be read without running code; None if it can, or is no pickle by its name."""
    if not path.name.endswith(PICKLES) or path.name == NEVER_LOADED:
        return None
    try:
        load_without_code(path)
    except Exception as error:  # of any kind: the file is a stranger's
        lines = str(error).splitlines()
        refused = [line for line in lines if REFUSED.search(line)]
        return (refused or lines or [type(error).__name__])[0].strip().rstrip(".")
    return None
