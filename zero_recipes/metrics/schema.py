"""Read metrics.json and samples.jsonl, and refuse with file and key whatever does not fit the contract.

Sizes are bytes, times are seconds, lists "per rank" are indexed by rank. Every measured field may be null or
absent in a row that did not finish; in a row of status "ok" only those of `NULLABLE` may.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

ORDER = ("ddp", "zero0", "zero1", "zero2", "zero3")

# What an "ok" row may lack: an accelerator, a stage (ddp), phases, a plan, and of course a failure.
NULLABLE = {"error", "zero_stage", "max_length", "allocated", "reserved", "memory_phases", "predicted", "failure"}
# rows of earlier versions lack them; nothing on NVMe, nothing offloaded from a GPU, no wall_clock_breakdown
NULLABLE |= {"communication_bytes_between_nodes", "host_memory_phases", "nvme", "host_device_bytes_per_second"}
NULLABLE |= {"engine_seconds"}


Part = TypeVar("Part", bound=BaseModel)


class ContractError(ValueError):
    """A file does not fit the contract; the message names the file and the key."""


# Strict JSON has no NaN: a writer that respects this turns a diverged loss into null.
Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


class PeakMemory(_Part):
    """Highest bytes of one rank: allocated and reserved on the accelerator, rss of the process."""

    allocated: int | None = None
    reserved: int | None = None
    rss: int | None = None


class RankState(_Part):
    """Model-state bytes of one rank: the first three on the device that trains, the others elsewhere."""

    params: int | None = None
    grads: int | None = None
    optimizer: int | None = None
    offloaded_host: int | None = None
    offloaded_disk: int | None = None


class Tokens(_Part):
    """Tokens of the whole run, or per second, over all ranks."""

    all: float | None = None
    non_padding: float | None = None
    supervised: float | None = None


class StepSeconds(_Part):
    """Seconds per optimizer step after the warm-up steps."""

    median: float | None = None
    p90: float | None = None
    warmup_steps_excluded: int | None = None


class Evaluation(_Part):
    """Loss on the evaluation set after `step` optimizer steps."""

    step: int
    loss: Measured


class Holding(_Part):
    """Something that held memory when a run failed, in bytes."""

    what: str
    bytes: int


class Failure(_Part):
    """What is known about a run that ended early."""

    phase: str | None = None
    rank: int | None = None
    largest_memory: list[Holding] = []
    cures: list[str] = []
    signal: str | None = None


class Sample(_Part):
    """One line of samples.jsonl: a prompt, the answers before and after training, and their scores."""

    prompt: str
    before: str
    after: str | None = None
    reference: str | None = None
    scores_before: dict[str, float | None]
    scores_after: dict[str, float | None] = {}


class Run(_Part):
    """One metrics.json (see the contract) together with the folder it lies in and its samples."""

    folder: Path
    samples: list[Sample] = []

    schema_version: Literal[1] = Field(alias="schema")
    status: Literal["ok", "oom", "failed", "refused"]
    error: str | None = None
    name: str
    strategy: str
    zero_stage: int | None = None
    world_size: int | None = None
    device: str | None = None
    model: str | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_length: int | None = None
    peak_memory_bytes: list[PeakMemory | None] | None = None
    memory_phases: dict[str, int | None] | None = None
    host_memory_phases: dict[str, int] | None = None
    model_state_bytes: list[RankState | None] | None = None
    communication_bytes_per_step: dict[str, int] | None = None
    communication_bytes_between_nodes: dict[str, int] | None = None
    tokens: Tokens | None = None
    tokens_per_second: Tokens | None = None
    step_seconds: StepSeconds | None = None
    nvme: dict[str, Any] | None = None
    host_device_bytes_per_second: dict[str, float] | None = None
    engine_seconds: dict[str, float] | None = None
    phase_seconds: dict[str, float | None] | None = None
    loss_history: list[Measured] | None = None
    grad_norm_history: list[Measured] | None = None
    eval_history: list[Evaluation] | None = None
    predicted: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None
    recipe_sha256: str | None = None
    failure: Failure | None = None

    @property
    def compared(self) -> bool:
        """True for a row of the sweep, whose folder carries the strategy's name."""
        return self.folder.name == self.strategy

    @property
    def label(self) -> str:
        """How plots and tables call this run."""
        return self.strategy if self.compared else self.folder.name


def read_runs(folder: Path) -> list[Run]:
    """Every run in `folder` and one level below: ddp and zero0 to zero3 first, then the others by name."""
    folder = Path(folder).resolve()  # "." has no name of its own, and names decide what is compared
    files = [folder / "metrics.json", *sorted(folder.glob("*/metrics.json"))]
    runs = [_read_run(file) for file in files if file.is_file()]
    if not runs:
        raise ContractError(f"no metrics.json in {folder} or one level below it")
    return sorted(runs, key=_rank_in_report)


def _rank_in_report(run: Run) -> tuple[int, str]:
    listed = run.compared and run.strategy in ORDER
    return (ORDER.index(run.strategy) if listed else len(ORDER), run.folder.name)


def _read_run(file: Path) -> Run:
    content = _parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(content, dict):
        raise ContractError(f"{file}: expected one JSON object, found {type(content).__name__}")
    samples = _read_samples(file.with_name("samples.jsonl"))
    run = _validate(Run, {**content, "folder": file.parent, "samples": samples}, str(file))
    if run.status == "ok":
        missing = next(_empty_keys(run), None)
        if missing:
            raise ContractError(f'{file}: {missing}: null or missing, though the status is "ok"')
    return run


def _read_samples(file: Path) -> list[Sample]:
    """One Sample per line; an absent file means that no prompts were sampled."""
    if not file.is_file():
        return []
    # Not splitlines(): an answer may hold a bare U+2028, which JSON leaves unescaped and splitlines() cuts at.
    lines = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)
    return [
        _validate(Sample, _parse(line, f"{file} line {number}"), f"{file} line {number}")
        for number, line in lines
        if line.strip()
    ]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ContractError(f"{where}: not JSON: {error}") from error


def _validate(model: type[Part], content: Any, where: str) -> Part:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(whole line)"
        what = "missing" if first["type"] == "missing" else f"{first['msg']}, found {_short(first['input'])}"
        raise ContractError(f"{where}: {key}: {what}") from error


def _short(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _empty_keys(part: BaseModel, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields that are None and may not be, depth first."""
    for key in type(part).model_fields:
        value = getattr(part, key)
        if key == "samples" or key in NULLABLE:
            continue
        if value is None:
            yield prefix + key
        elif isinstance(value, BaseModel):
            yield from _empty_keys(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if item is None:
                    yield f"{prefix}{key}.{index}"
                elif isinstance(item, BaseModel):
                    yield from _empty_keys(item, f"{prefix}{key}.{index}.")
