"""Models of metrics.json and of a plan's prediction. fields.yaml describes each field.

Times are in seconds. Lists "per rank" are indexed by rank. Every field with a default may be null or absent in a run
that did not finish. With status "ok", only the fields that fields.yaml marks with `null` may be null.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from zero_recipes.core.files import write_text
from zero_recipes.core.run_end import UNFINISHED

SCHEMA = 2  # 1 had no status "running": such a run had failed with the error UNFINISHED
FILE = "metrics.json"
ORDER = ("ddp", "zero0", "zero1", "zero2", "zero3")
PARTS = ("params", "grads", "optimizer", "activations", "buckets", "loss_head", "other")
Status = Literal["running", "ok", "oom", "diverged", "preempted", "failed", "refused"]
Precision = Literal["bf16", "fp16", "fp32"]
Count = Annotated[int, Field(ge=0, lt=2**63)]  # what a report computes with
# Strict JSON has no NaN: a number that is not finite is written as null, and read as NaN.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]


class Part(BaseModel):
    """The base of all models of metrics.json. Unknown keys are ignored, because a later version may have added them."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


class PeakMemory(Part):
    """Peak memory of one rank."""

    allocated: int | None = None
    reserved: int | None = None
    rss: int | None = None


class ModelStateBytes(Part):
    """Model states of one rank. The first three are on the training device, the others are offloaded."""

    params: int | None = None
    grads: int | None = None
    optimizer: int | None = None
    offloaded_host: int | None = None
    offloaded_disk: int | None = None

    @property
    def total(self) -> int:
        """Bytes on the training device, without offloaded states."""
        return (self.params or 0) + (self.grads or 0) + (self.optimizer or 0)


class Tokens(Part):
    """Tokens over all ranks, or tokens per second."""

    all: int | float | None = None
    non_padding: int | float | None = None
    supervised: int | float | None = None


class StepSeconds(Part):
    """Seconds per optimizer step after the warm-up steps."""

    median: float | None = None
    p90: float | None = None
    warmup_steps_excluded: int | None = None


class Evaluation(Part):
    """The loss of one evaluation."""

    step: int
    loss: Number


class Failure(Part):
    """Details of a run that ended early."""

    phase: str | None = None
    rank: int | None = None
    is_echo: bool | None = None
    largest_memory: dict[str, int] = {}
    signal: str | None = None
    code: str | None = None
    reason: str | None = None


class ReservedRange(Part):
    """Memory that the process will reserve on one GPU."""

    low: int
    high: int


class HostBytes(Part):
    """Host memory of one machine, over all its ranks."""

    load: int
    training: int
    resume: int | None = None

    @property
    def most(self) -> int:
        """What a run needs that does not resume."""
        return max(self.load, self.training)


class CheckpointBytes(Part):
    """Disk space over all ranks: the saved model or adapter, and a resumable checkpoint."""

    weights: int
    resumable: int


class PredictedMetrics(Part):
    """The part of a prediction in metrics.json, for the rank that needs the most memory."""

    source: Literal["engine", "formulas"] | None = None
    peak_memory_bytes: int | None = None
    model_state_bytes: ModelStateBytes | None = None
    at_peak: dict[str, int] | None = None
    peak_phase: str | None = None
    reserved_bytes: ReservedRange | None = None
    host_bytes: HostBytes | None = None
    flops_per_step: int | None = None

    @property
    def state_bytes(self) -> int | None:
        """Bytes of the planned model states on the device that trains; None where unknown."""
        return (self.model_state_bytes and self.model_state_bytes.total) or None


EngineOnly = Field(None, exclude_if=lambda value: value is None)  # JSON leaves it out elsewhere


class Prediction(BaseModel):
    """What a plan says that one job needs, of the rank that needs most (0 or world_size - 1).

    `model_dump()` is its JSON.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    source: Literal["engine", "formulas"]  # engine: simulated; formulas: the papers' and DeepSpeed's
    strategy: str  # a name of accelerate_configs/, or single
    zero_stage: int | None
    world_size: int
    parameters: int  # LoRA's included
    trainable_parameters: int
    precision: str
    micro_batch_size: int  # sequences of one rank
    gradient_accumulation_steps: int
    max_length: int  # tokens of every sequence
    allocated_peak_bytes: int  # live tensors on the accelerator
    peak_phase: str  # forward, backward, step, between, evaluation or best model
    at_peak: dict[str, int]  # of PARTS
    peaks: dict[str, int] | None = EngineOnly  # of each phase
    model_state_bytes: ModelStateBytes
    memory_phases: dict[str, int] | None = EngineOnly
    reserved_bytes: ReservedRange
    host_bytes: HostBytes
    nvme_bytes: int = 0  # swap files of one machine
    checkpoint_bytes: CheckpointBytes
    communication_bytes_per_step: dict[str, int]  # full tensors through each collective
    flops_per_step: int
    notes: list[str]  # what the prediction does not know about this job

    @property
    def state_bytes(self) -> int:
        """Model states at rest on the device that trains."""
        return self.model_state_bytes.total

    @property
    def for_metrics(self) -> PredictedMetrics:
        """The part of the prediction that metrics.json carries."""
        carried = {name: getattr(self, name) for name in PredictedMetrics.model_fields if hasattr(self, name)}
        return PredictedMetrics(**carried, peak_memory_bytes=self.allocated_peak_bytes)


class ContractError(ValueError):
    """Raised where a file does not match the schema. The message names the file and the key."""


class RunStatus(Part):
    """How a run ended, or that it has not."""

    schema_version: Literal[1, 2] = Field(alias="schema")
    status: Status
    error: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_schema_1(cls, row: Any) -> Any:
        """A run that was alive, or was killed."""
        if not isinstance(row, dict) or row.get("schema") != 1:
            return row
        if not str(row.get("error")).startswith(UNFINISHED):
            return row
        saved = row["error"].removeprefix(UNFINISHED).removeprefix(": ")
        return row | {"schema": SCHEMA, "status": "running", "error": saved or None}


class RunIdentity(Part):
    """The identity of a run, known before the first step."""

    name: str
    strategy: str
    zero_stage: Count | None = None
    world_size: Count | None = None
    device: str | None = None
    model: str | None = None
    model_revision: str | None = None
    parameters: Count | None = None
    trainable_parameters: Count | None = None
    gradients_not_quantized: float | None = None
    precision: Precision | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_length: int | None = None
    recipe_sha256: str | None = None


class Measurements(Part):
    """Measurements over all ranks and steps. Checkpoints store them for resumed runs."""

    peak_memory_bytes: list[PeakMemory | None] | None = None
    model_state_bytes: list[ModelStateBytes | None] | None = None
    communication_bytes_per_step: dict[str, int] | None = None
    communication_bytes_between_nodes: dict[str, int] | None = {}
    tokens: Tokens | None = None
    tokens_per_second: Tokens | None = None
    model_flops_per_token: float | None = None
    model_flops_per_second: float | None = None
    mfu: float | None = None
    step_seconds: StepSeconds | None = None
    skipped_steps: int | None = None
    loss_history: list[Number] | None = None


class Metrics(Measurements, RunIdentity, RunStatus):
    """The content of one metrics.json. Fields that were never set are not written."""

    memory_phases: dict[str, int | None] | None = None
    phase_seconds: dict[str, float | None] | None = None
    first_step: int = 1
    resumed_at: list[int] = []
    exact_master_weights: bool | None = None
    stopped_early_at: Count | None = None
    best_step: Count | None = None
    grad_norm_history: list[Number] | None = None
    eval_history: list[Evaluation] | None = None
    predicted: PredictedMetrics | None = None
    versions: dict[str, str] | None = None
    hardware: dict[str, str | int | None] | None = None
    failure: Failure | None = None

    @property
    def losses(self) -> dict[int, float]:
        """The run's losses by optimizer step.

        Those of a resumed run whose checkpoint carried no history begin at `first_step`.
        """
        return dict(enumerate(self.loss_history or [], self.first_step))

    @property
    def fullest_rank(self) -> ModelStateBytes | None:
        """The rank that holds most model state on the device that trains; None where none was measured."""
        ranks = [rank for rank in self.model_state_bytes or [] if rank]
        measured = [rank for rank in ranks if {rank.params, rank.grads, rank.optimizer} != {None}]
        return max(measured, key=lambda rank: rank.total, default=None)

    @property
    def speed(self) -> float | None:
        """Non-padding tokens per second over all ranks."""
        return self.tokens_per_second.non_padding if self.tokens_per_second else None

    def peak(self, kind: str) -> int | None:
        """The largest peak of all ranks in bytes; `kind`: a field of PeakMemory."""
        return max((getattr(rank, kind) or 0 for rank in self.peak_memory_bytes or [] if rank), default=0) or None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file at `path`. Raises ContractError, which names the file and the key."""
        return read_part(cls, path)

    def write(self, path: Path) -> None:
        """Write the file at `path` as strict JSON, atomically."""
        write_text(path, self.model_dump_json(by_alias=True, exclude_unset=True, indent=2) + "\n")


AnyPart = TypeVar("AnyPart", bound=Part)


def read_part(model: type[AnyPart], path: Path) -> AnyPart:
    """Read the JSON of a file as a model. Raises ContractError, which names the file and the first wrong key."""
    try:
        return parse_part(model, path.read_bytes(), str(path))
    except OSError as error:
        raise ContractError(f"{path}: {error.strerror}") from error


def parse_part(model: type[AnyPart], text: bytes, where: str) -> AnyPart:
    """Read JSON as a model. Raises ContractError, which names `where` and the first wrong key."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ContractError(f"{where}: {key + ': ' if key else ''}{first['msg']}") from error
