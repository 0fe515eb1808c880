"""What metrics.json is made of: the nested models and their documented fields. Bytes are bytes, times are seconds."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

NO_ACCELERATOR = "without an accelerator"
NO_LABELS = "where the model is given no labels (a Trainer with a loss of its own)"
ENDED_BEFORE = "where the run ended before"
EARLIER = "where it was not noted"
NOT_TIMED = "where no step was timed: a run of one or two steps"


class Part(BaseModel):
    """A piece of the file. Keys that it does not know are ignored: a later version may have added them."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


def measured(meaning: str, unit: str | None = None, null: str | None = None, default: Any = None) -> Any:
    """A field that a row which did not finish may lack.

    A row of status "ok" has it, unless `null` says when it is null there too ("without an accelerator").
    """
    more = {key: value for key, value in (("unit", unit), ("null", null)) if value is not None}
    return Field(default, description=meaning, json_schema_extra=more)


def known(meaning: str, unit: str | None = None, **more: Any) -> Any:
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

    allocated: int | None = measured(
        "live tensors on the accelerator, from the first step on, samples excluded", "bytes", NO_ACCELERATOR
    )
    reserved: int | None = measured(
        "what the caching allocator took of the accelerator, over the same time", "bytes", NO_ACCELERATOR
    )
    rss: int | None = measured("resident memory of the whole process", "bytes")


class PhaseBytes(Part):
    """Bytes after each phase of the first steps."""

    model_loaded: int | None = measured("the weights are loaded", "bytes", ENDED_BEFORE)
    engine_built: int | None = measured("the engine and its optimizer stand", "bytes", ENDED_BEFORE)
    forward: int | None = measured("after a forward pass", "bytes", ENDED_BEFORE)
    backward: int | None = measured("after a backward pass", "bytes", ENDED_BEFORE)
    step: int | None = measured("after an optimizer step", "bytes", ENDED_BEFORE)


class ModelStateBytes(Part):
    """Model states of one rank: the first three on the device that trains, the others elsewhere."""

    params: int | None = measured("parameters", "bytes")
    grads: int | None = measured("gradients", "bytes")
    optimizer: int | None = measured("states of the optimizer, the fp32 master included", "bytes")
    offloaded_host: int | None = measured(
        "states in the host's memory. In a CPU run, what the configuration offloads; what is swapped in for a moment "
        "counts there too",
        "bytes",
    )
    offloaded_disk: int | None = measured("states in swap files", "bytes")


class Tokens(Part):
    """Tokens of the whole run, over all ranks."""

    all: int | None = measured("padding included", "tokens")
    non_padding: int | None = measured("without padding", "tokens")
    supervised: int | None = measured("those that carry the loss", "tokens", NO_LABELS)


class TokensPerSecond(Part):
    """Tokens per second over all ranks and the timed steps."""

    all: float | None = measured("padding included", "tokens/s")
    non_padding: float | None = measured("without padding", "tokens/s")
    supervised: float | None = measured("those that carry the loss", "tokens/s", NO_LABELS)


class StepSeconds(Part):
    """Seconds per optimizer step after the warm-up steps."""

    median: float | None = measured("of the timed steps", "seconds", NOT_TIMED)
    p90: float | None = measured("nine of ten timed steps take at most so long", "seconds", NOT_TIMED)
    warmup_steps_excluded: int | None = measured(
        "the first steps, which are not timed: two, as the second is slowed by the probe of the memory; in a longer "
        "run half of it, at most five",
        "steps",
    )


class PhaseSeconds(Part):
    """Seconds of rank 0 by its host's clock since its process was started: the phases sum up to them.

    A phase inside another does not count in the outer one."""

    startup: float | None = measured("imports, checks, kernels, the ranks finding each other", "seconds", ENDED_BEFORE)
    data: float | None = measured("loading and tokenising the rows, and waiting for the plan", "seconds", ENDED_BEFORE)
    model: float | None = measured("loading the weights, building trainer and engine", "seconds", ENDED_BEFORE)
    train: float | None = measured("optimizer steps and logging", "seconds", ENDED_BEFORE)
    eval: float | None = measured("evaluations, and answers to the sample prompts", "seconds", ENDED_BEFORE)
    save: float | None = measured("saving checkpoints and the model, and checking it", "seconds", ENDED_BEFORE)


class Evaluation(Part):
    """One evaluation."""

    step: int = known("optimizer steps that were done", "steps")
    loss: Number = known("mean over all tokens of the split that carry loss; null where it is not finite", "nats/token")


class Hardware(Part):
    """The machine of rank 0."""

    cpu: str | None = measured("processor", null=EARLIER)
    cpu_cores: int | None = measured("cores that the process may use", null=EARLIER)
    ram_bytes: int | None = measured("memory of the machine", "bytes", EARLIER)
    gpu: str | None = measured("the accelerator's name", null=NO_ACCELERATOR)
    gpus_visible: int | None = measured("accelerators that the process sees", null=NO_ACCELERATOR)
    gpu_memory_bytes: int | None = measured("memory of one accelerator", "bytes", NO_ACCELERATOR)
    cuda: str | None = measured("CUDA version that torch was built with", null=NO_ACCELERATOR)


class Holding(Part):
    """Something that held memory when a run failed."""

    what: str = known("a part of the model states, or the rest of the peak")
    bytes: int = known("its size", "bytes")


class GradientDtypes(Part):
    """The precision of a step's gradients."""

    added_up: Literal["bf16", "fp16", "fp32"] = known("over the micro batches of a step")
    reduced: Literal["bf16", "fp16", "fp32", "bf16 and fp32"] = known(
        "over the ranks; torch_autocast reduces those of linear layers in bf16, the others in fp32"
    )


class Failure(Part):
    """What is known about a run that ended early."""

    phase: str | None = measured("the phase that failed (a key of phase_seconds), or unknown")
    rank: int | None = measured("the rank that failed first", null="where a signal ended it, or nothing is known")
    largest_memory: list[Holding] = measured("what held memory on that rank, the largest first", default=[])
    cures: list[str] = measured("what may help, in the order in which to try", default=[])
    signal: str | None = measured("the signal that ended a process", null="where none did")
