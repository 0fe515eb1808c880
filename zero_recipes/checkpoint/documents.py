"""The small files of a checkpoint that a run reads: each says what it can say, or the checkpoint is not whole."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

STATE, HISTORY, LATEST, STATES_INDEX = "trainer_state.json", "history.json", "latest", "zero_states/index.json"

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _CallbackState(_Strict):
    args: dict[str, Any] = {}
    attributes: dict[str, Any] = {}


class TrainerStateDocument(_Strict):
    """transformers' TrainerState as it writes it; the step alone must be there, the rest has defaults."""

    global_step: Count
    epoch: Annotated[Number, Field(ge=0)] | None = None
    max_steps: int = 0
    logging_steps: Number | None = None
    eval_steps: Number | None = None
    save_steps: Number | None = None
    train_batch_size: Annotated[int, Field(ge=1)] | None = None
    num_train_epochs: Annotated[Number, Field(ge=0)] = 0
    num_input_tokens_seen: Count = 0
    total_flos: Annotated[Number, Field(ge=0)] = 0
    log_history: list[dict[str, Any]] | None = None
    best_metric: float | None = None
    best_global_step: Count | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: dict[str, _CallbackState | list[_CallbackState]] | None = None


class _Source(_Strict):
    checkpoint: str
    stage: Annotated[int, Field(ge=1, le=3)]
    world_size: Annotated[int, Field(ge=1)]


class _Engine(_Strict):
    global_steps: Count
    global_samples: Count
    skipped_steps: Count
    lr_scheduler: dict[str, Any] | None


class _Group(_Strict):
    names: list[str]
    lr: Number
    betas: list[Number] = Field(min_length=2, max_length=2)
    initial_lr: Number = 0
    eps: Number = 0
    weight_decay: Number = 0


class StatesIndexDocument(_Strict):
    """zero_states/index.json of a resharded checkpoint (reshard/write.py)."""

    source: _Source
    global_batch: Annotated[int, Field(ge=1)]
    adam_step: Count
    states: Literal["fp32", "bf16"] = "fp32"
    engine: _Engine
    groups: list[_Group]


def read_json(path: Path) -> Any:
    """What a JSON file says. Raises ValueError, of every kind of file that says nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is a text that cannot be printed
        return found
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def document_fault(checkpoint: Path, step: int | None = None) -> str | None:
    """The first small file of a checkpoint that says what it cannot say; None if there is none.

    `step`: what the manifest says, for those that have one. history.json is read where it is used (trainer/).
    """
    named = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    if step is not None and named and int(named[1]) != step:
        return f"{checkpoint} is the checkpoint of step {step}, by its manifest."
    if (checkpoint / STATE).exists():
        fault = _fault_of_state(checkpoint / STATE, step)
        if fault is not None:
            return fault
    if (checkpoint / STATES_INDEX).exists():
        fault = _fault_of(checkpoint / STATES_INDEX, StatesIndexDocument)
        if fault is not None:
            return fault
    return _fault_of_latest(checkpoint)


def cannot_be_read(path: Path, why: str) -> str:
    """One line about one file."""
    return f"{path.parent} has {_article(path.name)} {path.name} that cannot be read: {why.splitlines()[0]}."


def first_fault(error: ValidationError) -> str:
    """Where a document is wrong, and what pydantic says of it."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _fault_of_state(path: Path, step: int | None) -> str | None:
    from transformers import TrainerControl, TrainerState

    fault = _fault_of(path, TrainerStateDocument)
    if fault is not None:
        return fault
    found = read_json(path)
    strange = found.keys() - {field.name for field in fields(TrainerState)}  # it would not take them
    control = ((found.get("stateful_callbacks") or {}).get("TrainerControl") or {}) if not strange else {}
    switches = {} if isinstance(control, list) else control.get("args", {})
    strange |= switches.keys() - {field.name for field in fields(TrainerControl)}
    if strange:
        return cannot_be_read(path, f"transformers does not know {sorted(strange)[0]}")
    if any(not isinstance(value, bool) for value in switches.values()) or isinstance(control, list):
        return cannot_be_read(path, "the switches of TrainerControl are not true or false")
    if step is not None and found["global_step"] != step:
        return f"{path} is of step {found['global_step']}; the manifest says {step}."
    return None


def _fault_of(path: Path, document: type[BaseModel]) -> str | None:
    try:
        document.model_validate(read_json(path))
    except ValidationError as error:
        return cannot_be_read(path, first_fault(error))
    except ValueError as error:
        return cannot_be_read(path, str(error))
    return None


def _fault_of_latest(checkpoint: Path) -> str | None:
    """DeepSpeed opens the folder that it names, wherever that is."""
    path = checkpoint / LATEST
    if not path.exists():
        return None
    try:
        name = path.read_text().strip()
    except (OSError, ValueError) as error:
        return cannot_be_read(path, str(error))
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        return f"{path} names {name[:40]!r}, which is no folder of this checkpoint."
    return None if os.path.isdir(checkpoint / name) else f"{path} names {name[:40]}: {name[:40]} is missing."


def _article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"
