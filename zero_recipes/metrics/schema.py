"""metrics.json as one model: written, read and documented (docs/metrics.md, docs/metrics.schema.json) from it.

Bytes are bytes, times are seconds, lists "per rank" are indexed by rank. Every measured field may be null or absent in
a row that did not finish; in a row of status "ok" only those that say when (`measured(..., null=...)`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ValidationError

from zero_recipes.core.files import write_text
from zero_recipes.metrics.parts import (
    EARLIER,
    NO_ACCELERATOR,
    NOT_TIMED,
    Count,
    Evaluation,
    Failure,
    GradientDtypes,
    Hardware,
    ModelStateBytes,
    Number,
    Part,
    PeakMemory,
    PhaseBytes,
    PhaseSeconds,
    StepSeconds,
    Tokens,
    TokensPerSecond,
    known,
    measured,
)
from zero_recipes.metrics.prediction import PredictedMetrics

SCHEMA = 1
FILE = "metrics.json"
ORDER = ("ddp", "zero0", "zero1", "zero2", "zero3")

NOT_COUNTED = f"{NOT_TIMED}, where the model's config does not say how wide attention is, and {EARLIER}"

Status = Literal["ok", "oom", "diverged", "failed", "refused"]
Precision = Literal["bf16", "fp16", "fp32"]


class ContractError(ValueError):
    """A file does not fit the contract; the message names the file and the key."""


class RunStatus(Part):
    """How a run ended."""

    schema_version: Literal[1] = known(
        "version of this contract; raised where a key changes its meaning", alias="schema"
    )
    status: Status = known(
        "how the run ended; diverged: its loss or weights were not finite any more; refused: before it started"
    )
    error: str | None = measured(
        "what went wrong in one line; a run at work, or killed, says that it has not finished", null="where nothing did"
    )


class RunIdentity(Part):
    """Who a run is: what is known before the first step."""

    name: str = known("the recipe's file name")
    strategy: str = known(
        "single, ddp, fsdp2, zero0 to zero3, zero2_offload, zero3_offload, zero3_infinity, zero3_offload_infinity, "
        "zero3_hpz, zero3_qwz, zero3_qgz, zero3_plus_plus; with _bf16_states, _bf16_masters or _autocast where the "
        "ds_config asks for it, with _ulysses where sequences are shared"
    )
    zero_stage: Count | None = measured("0 to 3", null="without DeepSpeed (FSDP2 included)")
    world_size: Count | None = measured("processes, one a GPU", "ranks")
    device: str | None = measured("cpu, or the GPU's name")
    model: str | None = measured("model_name_or_path", null="of a model without a name")
    parameters: Count | None = measured("Ψ: weights of the model, with adapters", "parameters")
    trainable_parameters: Count | None = measured("those that are trained", "parameters")
    precision: Precision | None = measured("of the computation")
    micro_batch_size: int | None = measured("of one process and pass", "sequences")
    gradient_accumulation_steps: int | None = measured("of one optimizer step", "passes")
    max_length: int | None = measured("longest sequence", "tokens", "without a limit")
    recipe_sha256: str | None = measured("hash of the recipe's file", null="without a recipe")


class Measurements(Part):
    """What all ranks together have measured over the steps; a checkpoint carries it to the run that goes on."""

    peak_memory_bytes: list[PeakMemory | None] | None = measured("per rank: the highest of the run")
    model_state_bytes: list[ModelStateBytes | None] | None = measured(
        "per rank: of each part the largest within one optimizer step"
    )
    communication_bytes_per_step: dict[str, int] | None = measured(
        "by collective (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce): size of the full, "
        "unsharded tensors through it in one optimizer step; median over the warm-up steps",
        "bytes",
    )
    communication_bytes_between_nodes: dict[str, int] | None = measured(
        "the part of it whose process groups span machines, as one machine receives it (an all-to-all's parts summed "
        "over its processes); empty on one machine",
        "bytes",
        EARLIER,
    )
    tokens: Tokens | None = measured("over the whole run and all ranks")
    tokens_per_second: TokensPerSecond | None = measured("over the timed steps and all ranks", null=NOT_TIMED)
    model_flops_per_token: float | None = measured(
        "forward and backward of the model's matrix products and of attention within the rows of the timed steps, for "
        "each token that is no padding; nothing that activation checkpointing computes again",
        "FLOP",
        NOT_COUNTED,
    )
    model_flops_per_second: float | None = measured("of one process, over the timed steps", "FLOP/s", NOT_COUNTED)
    mfu: float | None = measured(
        "model FLOPs utilization: model_flops_per_second as a share of the dense peak of the GPU in the run's "
        "precision (zero_recipes/core/hardware.yaml)",
        null="on CPUs, on a GPU that the table has not, and wherever model_flops_per_second is",
    )
    step_seconds: StepSeconds | None = measured("optimizer steps")
    skipped_steps: int | None = measured(
        "of the whole run, those that the loss scale was too high for: no weight, state or learning rate changed",
        "steps",
        "unless in fp16",
    )
    loss_history: list[Number] | None = measured(
        "one number per optimizer step: the mean over all its tokens that carry loss, on whichever rank, null where it "
        "is not finite; of a resumed run the whole history, the interrupted part included",
        "nats/token",
        "of a Trainer other than ZeroSFTTrainer whose logging_steps is not 1",
    )


class Metrics(Measurements, RunIdentity, RunStatus):
    """One metrics.json. Fields that were never set are not written."""

    memory_phases: PhaseBytes | None = measured(
        "rank 0: allocated on the accelerator after each phase of the first steps", null=NO_ACCELERATOR
    )
    host_memory_phases: PhaseBytes | None = measured(
        "rank 0: resident memory of the process after the same phases", null=EARLIER
    )
    host_threads: int | None = measured(
        "threads of each process for what the CPU computes, an offloaded optimizer among it", null=EARLIER
    )
    phase_seconds: PhaseSeconds | None = measured("phases of the run")
    first_step: int = measured(
        "the step of loss_history's first number: 1, or later where a resumed checkpoint carried no history", default=1
    )
    resumed_at: list[int] = measured(
        "the steps at which the run was resumed; tokens and the histories cover the whole run, memory, times and rates "
        "the last process",
        default=[],
    )
    gradient_dtypes: GradientDtypes | None = measured(
        "of a step's gradients", null="under DeepSpeed in a Trainer other than ZeroSFTTrainer"
    )
    grad_norm_history: list[Number] | None = measured(
        "norm of the gradients before clipping, per optimizer step, null where it is not finite; empty where the "
        "engine keeps none (DeepSpeed stage 0 in fp32)"
    )
    first_nonfinite_step: int | None = measured(
        "the first step whose loss is not finite, and so null in loss_history", "steps", null="where all are finite"
    )
    eval_history: list[Evaluation] | None = measured("the evaluations")
    predicted: PredictedMetrics | None = measured(
        "what was planned before the run, on a GPU or with predict: true", null="where it was not"
    )
    versions: dict[str, str] | None = measured("by package: the version that ran, Python's included")
    hardware: Hardware | None = measured("the machine of rank 0")
    failure: Failure | None = measured("what is known of the end", null="unless the run failed")

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


def first_nonfinite(losses: Sequence[float], first: int) -> int | None:
    """The step of the first loss that is not finite; `first`: the step of the first loss."""
    return next((step for step, loss in enumerate(losses, first) if not math.isfinite(loss)), None)


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
