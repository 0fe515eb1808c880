"""TRL's own objects, made of a recipe's values."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from zero_recipes.config import keys
from zero_recipes.config.settings import Settings
from zero_recipes.core.library_errors import library_error_as_finding

# values in place of a recipe's: for TRL's arguments where rows are prepared, on any machine ...
WITHOUT_LAUNCH: dict[str, Any] = {
    "bf16": False,
    "ddp_backend": None,
    "deepspeed": None,
    "fp16": False,
    "fsdp": None,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "use_cpu": True,
}
# ... and where a model answers, without the training's processes or device
ONE_PROCESS: dict[str, Any] = WITHOUT_LAUNCH | {
    "accelerator_config": None,
    "fsdp_config": None,
    "load_in_4bit": False,
    "load_in_8bit": False,
    "packing": False,
    "padding_free": False,
    "parallelism_config": None,
    "push_to_hub": False,
    "report_to": "none",
    "tf32": None,
    "torch_compile": False,
    "use_liger_kernel": False,
}


class TrlArguments(NamedTuple):
    """TRL's own objects, for TRL's own functions; our code reads the settings."""

    script: Any  # ScriptArguments
    training: Any  # SFTConfig
    model: Any  # ModelConfig
    mixture: Any  # DatasetMixtureConfig


def trl_arguments(settings: Settings, path: Path) -> TrlArguments:
    """Make TRL's objects with the values in force. SFTConfig starts the process group.

    Raises Refusal for what a class of TRL or transformers refuses. `path`: the recipe's file, for the message.
    """
    objects = []
    for cls in keys.dataclasses_of_a_recipe()[:-1]:
        fields = [f.name for f in dataclasses.fields(cls) if f.init]
        with library_error_as_finding(f"making TRL's {cls.__name__} of {path}", fields):
            values = copy.deepcopy({key: value for key, value in settings.as_dict().items() if key in fields})
            for entry in values.get("datasets") or ():  # a mapping of columns is ours
                columns = entry.pop("columns", None)
                entry["columns"] = columns if isinstance(columns, list) else None
                for key in keys.ENTRY_KEYS:
                    entry.pop(key, None)
            objects.append(cls(**values))  # copied: DatasetMixtureConfig turns the mapping's entries into objects
    return TrlArguments(*objects)
