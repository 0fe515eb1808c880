"""What a plan says about a run: the shape that planner, metrics.json and report share."""

from __future__ import annotations

from typing import Any

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
