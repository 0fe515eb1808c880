"""Optimizer steps of a run, without the data set's library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def steps_by_epochs(rows: int, values: Mapping[str, Any], replicas: int) -> int:
    """Optimizer steps of a run by epochs (transformers 5.23 trainer.py, `set_initial_training_values`)."""
    micro, last = values["per_device_train_batch_size"], values["dataloader_drop_last"]
    batches = rows // micro // replicas if last else math.ceil(math.ceil(rows / micro) / replicas)
    return math.ceil(values["num_train_epochs"] * max(math.ceil(batches / values["gradient_accumulation_steps"]), 1))
