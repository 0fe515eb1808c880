"""What a plan says about a run: the shape that planner, metrics.json and report share."""

from __future__ import annotations

from typing import Any, Literal

from zero_recipes.metrics.parts import ModelStateBytes, Part, measured

PARTS = ("params", "grads", "optimizer", "activations", "buckets", "loss_head", "other")

# A prediction is a dict that JSON can hold. Bytes are bytes, of the rank that needs most (0 or world_size - 1):
#
# source                        "engine" (simulated) or "formulas"
# strategy, zero_stage, world_size, parameters, trainable_parameters, precision,
# micro_batch_size, gradient_accumulation_steps, max_length
# allocated_peak_bytes          the largest sum of live tensors on the accelerator in a training step
# peak_phase, peak_operator     where it stands: "forward" | "backward" | "step", and the operator ("aten.mm"); or null
# at_peak                       {part: bytes} over PARTS; the sum is allocated_peak_bytes
# model_state_bytes             {"params", "grads", "optimizer", "offloaded_host", "offloaded_disk"}, as in metrics.json
# memory_phases                 {"model_loaded", "engine_built", "forward", "backward", "step"}: allocated after each
# reserved_bytes                {"low", "high"}: the caching allocator's segments, and with CUDA context and NCCL
# host_bytes                    {"load", "training"}: per node, all its ranks together
# checkpoint_bytes              {"weights", "resumable"}: on disk, all ranks together
# communication_bytes_per_step  {collective: bytes of full tensors}, as in metrics.json
# flops_per_step                of one rank, matrix products and attention of forward and backward, recomputation too
# seconds                       how long the prediction took
# resident_bytes                how much memory the simulation of a rank took; only from the engine
# notes                         [str]: what it does not know about this job
Prediction = dict[str, Any]


class ReservedRange(Part):
    """What the process will take of one GPU."""

    low: int | None = measured("the caching allocator's segments", "bytes")
    high: int | None = measured("with the CUDA context and NCCL's buffers", "bytes")


class HostBytes(Part):
    """Host memory of one machine, all its ranks together."""

    load: int | None = measured("while the weights are loaded", "bytes")
    training: int | None = measured("in training", "bytes")


class PredictedMetrics(Part):
    """The part of a prediction that metrics.json carries, of the rank that needs most."""

    source: Literal["engine", "formulas"] | None = measured("engine: simulated; formulas: the papers' and DeepSpeed's")
    peak_memory_bytes: int | None = measured("allocated at the peak; beside peak_memory_bytes.allocated", "bytes")
    model_state_bytes: ModelStateBytes | None = measured("as model_state_bytes above")
    at_peak: dict[str, int] | None = measured(f"the peak by parts: {', '.join(PARTS)}", "bytes")
    peak_phase: str | None = measured("where the peak stands: forward, backward or step")
    reserved_bytes: ReservedRange | None = measured("of one GPU")
    host_bytes: HostBytes | None = measured("of one machine")
    flops_per_step: int | None = measured(
        "of one rank: matrix products and attention of forward and backward, recomputation too", "FLOP"
    )
