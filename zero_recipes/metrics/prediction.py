"""What a plan says about a run: the shape that planner, metrics.json and report share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zero_recipes.metrics.parts import ModelStateBytes, Part, PhaseBytes, known, measured

PARTS = ("params", "grads", "optimizer", "activations", "buckets", "loss_head", "other")


class ReservedRange(Part):
    """What the process will take of one GPU."""

    low: int = known("the caching allocator's segments, the CUDA context and NCCL's buffers", "bytes")
    high: int = known("the same with fragmentation by rows of other lengths", "bytes")


class HostBytes(Part):
    """Host memory of one machine, all its ranks together."""

    load: int = known("while the weights are loaded", "bytes")
    training: int = known("in training", "bytes")
    resume: int | None = measured("while a checkpoint is read to go on from it", "bytes", null="of older plans")


class CheckpointBytes(Part):
    """On disk, all ranks together."""

    weights: int = known("the saved model, or the adapter alone", "bytes")
    resumable: int = known("a checkpoint to go on from", "bytes")


class PredictedMetrics(Part):
    """The part of a prediction that metrics.json carries, of the rank that needs most."""

    source: Literal["engine", "formulas"] | None = measured("engine: simulated; formulas: the papers' and DeepSpeed's")
    peak_memory_bytes: int | None = measured("allocated at the peak; beside peak_memory_bytes.allocated", "bytes")
    model_state_bytes: ModelStateBytes | None = measured("as model_state_bytes above")
    at_peak: dict[str, int] | None = measured(f"the peak by parts: {', '.join(PARTS)}", "bytes")
    peak_phase: str | None = measured("where the peak stands: forward, backward, step, evaluation or best model")
    reserved_bytes: ReservedRange | None = measured("of one GPU")
    host_bytes: HostBytes | None = measured("of one machine")
    flops_per_step: int | None = measured(
        "of one rank: matrix products and attention of forward and backward, recomputation too", "FLOP"
    )


def _engine_only(meaning: str, unit: str | None = None) -> Any:
    """A field that only a simulation has; JSON leaves it out elsewhere."""
    return Field(None, description=meaning, json_schema_extra={"unit": unit}, exclude_if=lambda value: value is None)


class Prediction(BaseModel):
    """What one job needs, of the rank that needs most (0 or world_size - 1). `model_dump()` is its JSON."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    source: Literal["engine", "formulas"] = known("engine: simulated; formulas: the papers' and DeepSpeed's")
    strategy: str = known("a name of accelerate_configs/, or single")
    zero_stage: int | None = known("null without DeepSpeed")
    world_size: int = known("ranks")
    parameters: int = known("of the model, LoRA's included", "elements")
    trainable_parameters: int = known("those that get gradients", "elements")
    precision: str = known("bf16, fp16 or fp32")
    micro_batch_size: int = known("of one rank", "sequences")
    gradient_accumulation_steps: int = known("micro steps of an optimizer step")
    max_length: int = known("of every sequence", "tokens")
    allocated_peak_bytes: int = known(
        "the largest sum of live tensors on the accelerator, in a training step, an evaluation or where the best model "
        "is loaded",
        "bytes",
    )
    peak_phase: str = known("where the peak stands: forward, backward, step, between, evaluation or best model")
    peak_operator: str | None = _engine_only("the operator at the peak, e.g. aten.mm")
    at_peak: dict[str, int] = known(f"the peak by parts: {', '.join(PARTS)}", "bytes")
    peaks: dict[str, int] | None = _engine_only("the peak of each phase", "bytes")
    model_state_bytes: ModelStateBytes = known("as in metrics.json")
    memory_phases: PhaseBytes | None = _engine_only("allocated after each phase", "bytes")
    segment_bytes: int | None = _engine_only("the caching allocator's segments at their peak, replayed", "bytes")
    reserved_bytes: ReservedRange = known("of one GPU")
    host_bytes: HostBytes = known("of one machine")
    nvme_bytes: int = known("swap files on the NVMe of one machine, all its ranks together", "bytes", default=0)
    checkpoint_bytes: CheckpointBytes = known("on disk")
    communication_bytes_per_step: dict[str, int] = known("full tensors through each collective", "bytes")
    flops_per_step: int = known(
        "of one rank: matrix products and attention of forward and backward, recomputation too", "FLOP"
    )
    seconds: float | None = _engine_only("how long the simulation took", "seconds")
    resident_bytes: int | None = _engine_only("memory that the simulation of a rank took", "bytes")
    notes: list[str] = known("what the prediction does not know about this job")

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
