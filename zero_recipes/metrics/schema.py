"""metrics.json and a plan's prediction as models: written, read and documented (docs/metrics.md) from them.

Bytes are bytes, times are seconds, lists "per rank" are indexed by rank. Every optional field may be null or absent in
a row that did not finish; in a row of status "ok" only those that say when (`optional(..., null=...)`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from zero_recipes.core.files import write_text

SCHEMA = 1
FILE = "metrics.json"
ORDER = ("ddp", "zero0", "zero1", "zero2", "zero3")

NO_ACCELERATOR = "without an accelerator"
NO_LABELS = "where the model is given no labels (a Trainer with a loss of its own)"
NOT_TIMED = "where no step was timed: a run of one or two steps"


class Part(BaseModel):
    """A piece of the file. Keys that it does not know are ignored: a later version may have added them."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


def optional(meaning: str, unit: str | None = None, null: str | None = None, default: Any = None) -> Any:
    """A field that a row which did not finish may lack.

    A row of status "ok" has it, unless `null` says when it is null there too ("without an accelerator").
    """
    more = {key: value for key, value in (("unit", unit), ("null", null)) if value is not None}
    return Field(default, description=meaning, json_schema_extra=more)


def required(meaning: str, unit: str | None = None, **more: Any) -> Any:
    """A field that every row has."""
    return Field(description=meaning, json_schema_extra={} if unit is None else {"unit": unit}, **more)


Count = Annotated[int, Field(ge=0, lt=2**63)]  # what a report computes with
# Strict JSON has no NaN: a number that is not finite is written as null, and read as NaN.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]


class PeakMemory(Part):
    """Highest bytes of one rank's process."""

    allocated: int | None = optional(
        "live tensors on the accelerator, from the first step on, samples excluded", "bytes", NO_ACCELERATOR
    )
    reserved: int | None = optional(
        "what the caching allocator took of the accelerator, over the same time", "bytes", NO_ACCELERATOR
    )
    rss: int | None = optional("resident memory of the whole process", "bytes")


class ModelStateBytes(Part):
    """Model states of one rank: the first three on the device that trains, the others elsewhere."""

    params: int | None = optional("parameters", "bytes")
    grads: int | None = optional("gradients", "bytes")
    optimizer: int | None = optional("states of the optimizer, the fp32 master included", "bytes")
    offloaded_host: int | None = optional(
        "states in the host's memory. In a CPU run, what the configuration offloads; what is swapped in for a moment "
        "counts there too",
        "bytes",
    )
    offloaded_disk: int | None = optional("states in swap files", "bytes")


class Tokens(Part):
    """Tokens over all ranks, or how many of them a second."""

    all: int | float | None = optional("padding included")
    non_padding: int | float | None = optional("without padding")
    supervised: int | float | None = optional("those that carry the loss", null=NO_LABELS)


class StepSeconds(Part):
    """Seconds per optimizer step after the warm-up steps."""

    median: float | None = optional("of the timed steps", "seconds", NOT_TIMED)
    p90: float | None = optional("nine of ten timed steps take at most so long", "seconds", NOT_TIMED)
    warmup_steps_excluded: int | None = optional(
        "the first steps, which are not timed: two, as the second is slowed by the probe of the memory; in a longer "
        "run half of it, at most five",
        "steps",
    )


class Evaluation(Part):
    """One evaluation."""

    step: int = required("optimizer steps that were done", "steps")
    loss: Number = required(
        "mean over all tokens of the split that carry loss; null where it is not finite", "nats/token"
    )


class Failure(Part):
    """What is known about a run that ended early."""

    phase: str | None = optional("the phase that failed (a key of phase_seconds), or unknown")
    rank: int | None = optional("the rank that failed first", null="where a signal ended it, or nothing is known")
    largest_memory: dict[str, int] = optional(
        "by part: what held memory on that rank, the largest first", "bytes", default={}
    )
    signal: str | None = optional("the signal that ended a process", null="where none did")


PHASES = "model_loaded, engine_built, forward, backward, step"
PARTS = ("params", "grads", "optimizer", "activations", "buckets", "loss_head", "other")


class ReservedRange(Part):
    """What the process will take of one GPU."""

    low: int = required("the caching allocator's segments, the CUDA context and NCCL's buffers", "bytes")
    high: int = required("the same with fragmentation by rows of other lengths", "bytes")


class HostBytes(Part):
    """Host memory of one machine, all its ranks together."""

    load: int = required("while the weights are loaded", "bytes")
    training: int = required("in training", "bytes")
    resume: int | None = optional("while a checkpoint is read to go on from it", "bytes", null="of older plans")


class CheckpointBytes(Part):
    """On disk, all ranks together."""

    weights: int = required("the saved model, or the adapter alone", "bytes")
    resumable: int = required("a checkpoint to go on from", "bytes")


class PredictedMetrics(Part):
    """The part of a prediction that metrics.json carries, of the rank that needs most."""

    source: Literal["engine", "formulas"] | None = optional("engine: simulated; formulas: the papers' and DeepSpeed's")
    peak_memory_bytes: int | None = optional("allocated at the peak; beside peak_memory_bytes.allocated", "bytes")
    model_state_bytes: ModelStateBytes | None = optional("as model_state_bytes above")
    at_peak: dict[str, int] | None = optional(f"the peak by parts: {', '.join(PARTS)}", "bytes")
    peak_phase: str | None = optional("where the peak stands: forward, backward, step, evaluation or best model")
    reserved_bytes: ReservedRange | None = optional("of one GPU")
    host_bytes: HostBytes | None = optional("of one machine")
    flops_per_step: int | None = optional(
        "of one rank: matrix products and attention of forward and backward, recomputation too", "FLOP"
    )


def _engine_only(meaning: str, unit: str | None = None) -> Any:
    """A field that only a simulation has; JSON leaves it out elsewhere."""
    return Field(None, description=meaning, json_schema_extra={"unit": unit}, exclude_if=lambda value: value is None)


class Prediction(BaseModel):
    """What one job needs, of the rank that needs most (0 or world_size - 1). `model_dump()` is its JSON."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    source: Literal["engine", "formulas"] = required("engine: simulated; formulas: the papers' and DeepSpeed's")
    strategy: str = required("a name of accelerate_configs/, or single")
    zero_stage: int | None = required("null without DeepSpeed")
    world_size: int = required("ranks")
    parameters: int = required("of the model, LoRA's included", "elements")
    trainable_parameters: int = required("those that get gradients", "elements")
    precision: str = required("bf16, fp16 or fp32")
    micro_batch_size: int = required("of one rank", "sequences")
    gradient_accumulation_steps: int = required("micro steps of an optimizer step")
    max_length: int = required("of every sequence", "tokens")
    allocated_peak_bytes: int = required(
        "the largest sum of live tensors on the accelerator, in a training step, an evaluation or where the best model "
        "is loaded",
        "bytes",
    )
    peak_phase: str = required("where the peak stands: forward, backward, step, between, evaluation or best model")
    peak_operator: str | None = _engine_only("the operator at the peak, e.g. aten.mm")
    at_peak: dict[str, int] = required(f"the peak by parts: {', '.join(PARTS)}", "bytes")
    peaks: dict[str, int] | None = _engine_only("the peak of each phase", "bytes")
    model_state_bytes: ModelStateBytes = required("as in metrics.json")
    memory_phases: dict[str, int] | None = _engine_only(f"allocated after each phase: {PHASES}", "bytes")
    segment_bytes: int | None = _engine_only("the caching allocator's segments at their peak, replayed", "bytes")
    reserved_bytes: ReservedRange = required("of one GPU")
    host_bytes: HostBytes = required("of one machine")
    nvme_bytes: int = required("swap files on the NVMe of one machine, all its ranks together", "bytes", default=0)
    checkpoint_bytes: CheckpointBytes = required("on disk")
    communication_bytes_per_step: dict[str, int] = required("full tensors through each collective", "bytes")
    flops_per_step: int = required(
        "of one rank: matrix products and attention of forward and backward, recomputation too", "FLOP"
    )
    seconds: float | None = _engine_only("how long the simulation took", "seconds")
    resident_bytes: int | None = _engine_only("memory that the simulation of a rank took", "bytes")
    notes: list[str] = required("what the prediction does not know about this job")

    @property
    def state_bytes(self) -> int:
        """Model states at rest on the device that trains."""
        states = self.model_state_bytes
        return states.params + states.grads + states.optimizer

    @property
    def for_metrics(self) -> PredictedMetrics:
        """The part that metrics.json carries."""
        carried = {name: getattr(self, name) for name in PredictedMetrics.model_fields if hasattr(self, name)}
        return PredictedMetrics(**carried, peak_memory_bytes=self.allocated_peak_bytes)


NOT_COUNTED = f"{NOT_TIMED}, and where the model's config does not say how wide attention is"

Status = Literal["ok", "oom", "diverged", "failed", "refused"]
Precision = Literal["bf16", "fp16", "fp32"]


class ContractError(ValueError):
    """A file does not fit the contract; the message names the file and the key."""


class RunStatus(Part):
    """How a run ended."""

    schema_version: Literal[1] = required(
        "version of this contract; raised where a key changes its meaning", alias="schema"
    )
    status: Status = required(
        "how the run ended; diverged: its loss or weights were not finite any more; refused: before it started"
    )
    error: str | None = optional(
        "what went wrong in one line; a run at work, or killed, says that it has not finished", null="where nothing did"
    )


class RunIdentity(Part):
    """Who a run is: what is known before the first step."""

    name: str = required("the recipe's file name")
    strategy: str = required(
        "single, ddp, fsdp2, zero0 to zero3, zero2_offload, zero3_offload, zero3_infinity, zero3_offload_infinity, "
        "zero3_hpz, zero3_qwz, zero3_qgz, zero3_plus_plus; with _bf16_states, _bf16_masters or _autocast where the "
        "ds_config asks for it, with _ulysses where sequences are shared"
    )
    zero_stage: Count | None = optional("0 to 3", null="without DeepSpeed (FSDP2 included)")
    world_size: Count | None = optional("processes, one a GPU", "ranks")
    device: str | None = optional("cpu, or the GPU's name")
    model: str | None = optional("model_name_or_path", null="of a model without a name")
    parameters: Count | None = optional("Ψ: weights of the model, with adapters", "parameters")
    trainable_parameters: Count | None = optional("those that are trained", "parameters")
    precision: Precision | None = optional("of the computation")
    micro_batch_size: int | None = optional("of one process and pass", "sequences")
    gradient_accumulation_steps: int | None = optional("of one optimizer step", "passes")
    max_length: int | None = optional("longest sequence", "tokens", "without a limit")
    recipe_sha256: str | None = optional("hash of the recipe's file", null="without a recipe")


class Measurements(Part):
    """What all ranks together have measured over the steps; a checkpoint carries it to the run that goes on."""

    peak_memory_bytes: list[PeakMemory | None] | None = optional("per rank: the highest of the run")
    model_state_bytes: list[ModelStateBytes | None] | None = optional(
        "per rank: of each part the largest within one optimizer step"
    )
    communication_bytes_per_step: dict[str, int] | None = optional(
        "by collective (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce): size of the full, "
        "unsharded tensors through it in one optimizer step; median over the warm-up steps",
        "bytes",
    )
    communication_bytes_between_nodes: dict[str, int] | None = optional(
        "the part of it whose process groups span machines, as one machine receives it (an all-to-all's parts summed "
        "over its processes); empty on one machine",
        "bytes",
        default={},
    )
    tokens: Tokens | None = optional("over the whole run and all ranks")
    tokens_per_second: Tokens | None = optional("over the timed steps and all ranks", null=NOT_TIMED)
    model_flops_per_token: float | None = optional(
        "forward and backward of the model's matrix products and of attention within the rows of the timed steps, for "
        "each token that is no padding; nothing that activation checkpointing computes again",
        "FLOP",
        NOT_COUNTED,
    )
    model_flops_per_second: float | None = optional("of one process, over the timed steps", "FLOP/s", NOT_COUNTED)
    mfu: float | None = optional(
        "model FLOPs utilization: model_flops_per_second as a share of the dense peak of the GPU in the run's "
        "precision (zero_recipes/core/hardware.yaml)",
        null="on CPUs, on a GPU that the table has not, and wherever model_flops_per_second is",
    )
    step_seconds: StepSeconds | None = optional("optimizer steps")
    skipped_steps: int | None = optional(
        "of the whole run, those that the loss scale was too high for: no weight, state or learning rate changed",
        "steps",
        "unless in fp16",
    )
    loss_history: list[Number] | None = optional(
        "one number per optimizer step: the mean over all its tokens that carry loss, on whichever rank, null where it "
        "is not finite; of a resumed run the whole history, the interrupted part included",
        "nats/token",
        "of a Trainer other than ZeroSFTTrainer whose logging_steps is not 1",
    )


class Metrics(Measurements, RunIdentity, RunStatus):
    """One metrics.json. Fields that were never set are not written."""

    memory_phases: dict[str, int | None] | None = optional(
        f"rank 0: allocated on the accelerator after each phase of the first steps: {PHASES}", "bytes", NO_ACCELERATOR
    )
    phase_seconds: dict[str, float | None] | None = optional(
        "of rank 0 by its host's clock since its process was started, by phase: startup (imports, checks, kernels, the "
        "ranks finding each other), data (rows, and waiting for the plan), model (weights, trainer, engine), train "
        "(optimizer steps and logging), eval (evaluations and sample prompts), save (checkpoints and the model). They "
        "sum up to all of them: a phase inside another does not count in the outer one",
        "seconds",
    )
    first_step: int = optional(
        "the step of loss_history's first number: 1, or later where a resumed checkpoint carried no history", default=1
    )
    resumed_at: list[int] = optional(
        "the steps at which the run was resumed; tokens and the histories cover the whole run, memory, times and rates "
        "the last process",
        default=[],
    )
    grad_norm_history: list[Number] | None = optional(
        "norm of the gradients before clipping, per optimizer step, null where it is not finite; empty where the "
        "engine keeps none (DeepSpeed stage 0 in fp32)"
    )
    eval_history: list[Evaluation] | None = optional("the evaluations")
    predicted: PredictedMetrics | None = optional(
        "what was planned before the run, on a GPU or with predict: true", null="where it was not"
    )
    versions: dict[str, str] | None = optional("by package: the version that ran, Python's included")
    hardware: dict[str, str | int | None] | None = optional(
        "the machine of rank 0: cpu, cpu_cores (that the process may use), ram_bytes; with an accelerator also gpu, "
        "gpus_visible, gpu_memory_bytes (of one) and cuda (that torch was built with)"
    )
    failure: Failure | None = optional("what is known of the end", null="unless the run failed")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file at `path`. Raises ContractError, which names the file and the key."""
        row = read_part(cls, path)
        missing = next(_empty_keys(row), None) if row.status == "ok" else None
        if missing:
            raise ContractError(f'{path}: {missing}: null or missing, though the status is "ok"')
        return row

    def write(self, path: Path) -> None:
        """Write strict JSON, whole or not at all."""
        write_text(path, self.model_dump_json(by_alias=True, exclude_unset=True, indent=2) + "\n")


AnyPart = TypeVar("AnyPart", bound=Part)


def read_part(model: type[AnyPart], path: Path) -> AnyPart:
    """The JSON of a file as a model. Raises ContractError, which names the file and the first key that does not fit."""
    try:
        return parse_part(model, path.read_bytes(), str(path))
    except OSError as error:
        raise ContractError(f"{path}: {error.strerror}") from error


def parse_part(model: type[AnyPart], text: bytes, where: str) -> AnyPart:
    """JSON as a model. Raises ContractError, which names `where` and the first key that does not fit."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ContractError(f"{where}: {key + ': ' if key else ''}{first['msg']}") from error


def _empty_keys(part: BaseModel, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields that are None and may not be, depth first."""
    for key, field in type(part).model_fields.items():
        value = getattr(part, key)
        if "null" in (field.json_schema_extra or {}):
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
