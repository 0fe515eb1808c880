"""Resuming from a stranger's DeepSpeed checkpoint runs whatever code its files name.

DeepSpeed loads its files with `weights_only=False`. The Trainer's own check covers the files of transformers alone.

Library: DeepSpeed 0.19.8, runtime/checkpoint_engine/torch_checkpoint_engine.py (`load`).
Upstream: none found.
Here: every pickle of a checkpoint is read without code first; one that cannot be is refused.

See it: one CPU

    import os, tempfile

    import torch
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    folder = tempfile.mkdtemp()


    class Call:
        def __reduce__(self):
            return os.mkdir, (folder + "/made",)


    torch.save({"module": Call()}, folder + "/mp_rank_00_model_states.pt")
    TorchCheckpointEngine().load(folder + "/mp_rank_00_model_states.pt")
    assert os.path.isdir(folder + "/made")
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from zero_recipes.core.files import PICKLES
from zero_recipes.core.findings import first_line

NEVER_LOADED = "training_args.bin"  # by a run or by transformers' resume
REFUSED = re.compile(r"[Uu]nsupported|WeightsUnpickler error")  # messages of torch/_weights_only_unpickler.py


def load_without_code(path: Path) -> Any:
    """Return what torch.save wrote, with mapped tensors, and run no code of it. Raises torch.load's errors."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from transformers.trainer_pt_utils import safe_globals

    def stage(kind: type, name: str) -> ZeroStageEnum:
        """Python 3.11.2 (Debian 12) pickles a member of an enum as `getattr(kind, name)`."""
        if kind is not ZeroStageEnum:
            raise pickle.UnpicklingError(f"getattr of {kind} is no data")
        return ZeroStageEnum[name]

    of_deepspeed = [
        DynamicLossScaler,
        LossScaler,
        ZeroStageEnum,
        fragment_address,
        (stage, "builtins.getattr"),
        (stage, "__builtin__.getattr"),
    ]
    with safe_globals(), torch.serialization.safe_globals(of_deepspeed):
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def not_plain(path: Path) -> str | None:
    """Say why a file cannot be read without running code. None if it can, or is no pickle by its name."""
    if not path.name.endswith(PICKLES) or path.name == NEVER_LOADED:
        return None
    try:
        load_without_code(path)
    except Exception as error:  # any kind: the file is a stranger's
        lines = str(error).splitlines()
        return next(filter(REFUSED.search, lines), first_line(error)).strip().rstrip(".")
    return None
