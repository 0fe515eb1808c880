"""A prediction by textbook formulas, in milliseconds: `zero-recipes plan --quick`. The engine's simulation is exact.

Model states: zero_recipes/theory/zero_paper.py (arXiv:1910.02054), with what DeepSpeed 0.19.8 adds inside its step
(zero_recipes/theory/deepspeed_memory.py). Activations: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", arXiv:2205.05198, section 4.1 and table 2, without dropout's masks; widths of grouped queries and
gated MLPs counted in the same way. Symbols: Ψ parameters, T trainable ones, N ranks, s tokens in a sequence, b
sequences in a micro batch, h hidden width, a heads, L layers, V vocabulary.
"""

from __future__ import annotations

import time

from zero_recipes.checks.lower_bounds import (
    DTYPE_BYTES,
    beside_offloaded_optimizer,
    resumable_bytes,
    swap_buffers,
)
from zero_recipes.config.ds_config import number_in
from zero_recipes.metrics.parts import ModelStateBytes, PhaseBytes
from zero_recipes.metrics.prediction import PARTS, CheckpointBytes, HostBytes, Prediction
from zero_recipes.plan.formulas import family
from zero_recipes.plan.formulas.shape import (
    Shape,
    batch_tokens,
    computed_width,
    layer_bytes,
    loaded_width,
    shape_of,
    tokens_of,
)
from zero_recipes.plan.formulas.work import communication_bytes, flops
from zero_recipes.plan.job import Job
from zero_recipes.plan.overheads import overheads
from zero_recipes.theory.lower_bounds import read_at_resume, swapped_bytes
from zero_recipes.theory.zero_paper import ModelState, model_state_bytes, model_state_bytes_fp32

DEFAULT_BUCKET = 500_000_000  # elements; deepspeed/runtime/zero/config.py `reduce_bucket_size`
DEFAULT_LIVE = 1_000_000_000  # elements; `max_live_parameters`
NOTES = [
    "By textbook formulas: what the formulas leave out (copies in fp32 inside norms, masks, workspace of kernels) is "
    "not in the numbers.",
    "Loss head: TRL 1.16 computes it in chunks (trl/kernels/chunked_logprob.py); the logits are never held whole.",
]


def predict_by_formulas(job: Job) -> Prediction:
    """What `job` needs. Raises Refusal where the model's class cannot be built."""
    started = time.perf_counter()
    shape = shape_of(job.config, job.settings)
    states, copies = model_states(job, shape), step_copies(job, shape)
    backward = {
        "params": states.params,
        "grads": states.grads,
        "optimizer": states.optimizer,
        "activations": activation_bytes(job, shape),
        "buckets": bucket_bytes(job, shape),
        "loss_head": loss_head_bytes(job, shape),
        "other": _autocast_copies(job, shape),
    }
    partition_of_stage_1 = states.grads / job.world_size if job.zero_stage == 1 else states.grads
    step = dict.fromkeys(PARTS, 0) | {
        "params": states.params,
        "grads": partition_of_stage_1,
        "optimizer": states.optimizer,
        "other": copies,
    }
    phases = [
        ("backward", backward),
        ("step", step),
        *family.beside_steps(job, shape, states, computed_width(job), backward["buckets"]),
    ]
    phase, at_peak = max(phases, key=lambda found: sum(found[1].values()))
    at_peak = {part: int(size) for part, size in at_peak.items()}
    peak = sum(at_peak.values())
    resting = states.params + states.optimizer
    return Prediction(
        source="formulas",
        strategy=job.strategy,
        zero_stage=job.zero_stage,
        world_size=job.world_size,
        parameters=shape.parameters,
        trainable_parameters=shape.trainable,
        precision=job.precision,
        micro_batch_size=job.settings.per_device_train_batch_size,
        gradient_accumulation_steps=job.settings.gradient_accumulation_steps,
        max_length=tokens_of(job, shape),
        allocated_peak_bytes=peak,
        peak_phase=phase,
        peak_operator=None,
        at_peak=at_peak,
        model_state_bytes=ModelStateBytes(
            **{part: int(size) for part, size in states._asdict().items()},
            offloaded_host=int(_offloaded(job, shape, "cpu")),
            offloaded_disk=int(_offloaded(job, shape, "nvme")),
        ),
        memory_phases=PhaseBytes(
            model_loaded=int(states.params) if job.zero_stage == 3 else 0,
            engine_built=int(resting),
            forward=int(resting + backward["activations"] + backward["other"]),
            backward=int(resting + states.grads + backward["buckets"]),
            step=int(resting),
        ),
        reserved_bytes=overheads().reserved_range(peak, job.world_size),
        host_bytes=host_bytes(job, shape),
        nvme_bytes=int(job.ranks_per_node * _offloaded(job, shape, "nvme")),
        checkpoint_bytes=checkpoint_sizes(job, shape),
        communication_bytes_per_step=communication_bytes(job, shape),
        flops_per_step=flops(job, shape),
        seconds=time.perf_counter() - started,
        notes=NOTES + _notes(job, shape),
    )


def model_states(job: Job, shape: Shape) -> ModelState:
    """Bytes on the GPU of one rank at rest; what the ds_config offloads is not there (`_offloaded`)."""
    if job.is_fsdp:
        return family.fsdp_states(job, shape, loaded_width(job, shape), computed_width(job))
    if job.ds_config is None:
        each = loaded_width(job, shape)  # under autocast weights, gradients and Adam keep the dtype of loading
        held = family.packed_bytes(job, shape, each)
        return ModelState(held, each * shape.trainable, 2 * each * shape.trainable)
    states, optimizer = _sharded(job, shape), job.zero.offload_optimizer
    # ZeRO-Offload moves each gradient to the host as it is reduced: arXiv:2101.06840, section 4.2
    return ModelState(
        0 if job.offloads_params else states.params + family.second_copy(job, shape, computed_width(job)),
        0 if optimizer else states.grads,
        0 if optimizer else states.optimizer,
    )


def _sharded(job: Job, shape: Shape) -> ModelState:
    sizes = (shape.parameters, job.world_size, job.zero_stage, shape.trainable)
    if job.settings.precision == "fp32":
        states = model_state_bytes_fp32(*sizes)
        if job.zero_stage:  # DeepSpeed keeps masters beside weights that are fp32 themselves (deepspeed_memory.py)
            states = states._replace(optimizer=1.5 * states.optimizer)
    else:
        states = model_state_bytes(*sizes, job.zero.adam_bytes)
    share = family.packed_bytes(job, shape, computed_width(job)) / (computed_width(job) * shape.parameters)
    return states._replace(params=share * states.params)


def _offloaded(job: Job, shape: Shape, device: str) -> float:
    """Bytes of one rank's model states in host memory ("cpu") or on disk ("nvme")."""
    if job.ds_config is None:
        return 0
    if device == "nvme":
        return swapped_bytes(job.zero, shape.tensors, job.world_size, computed_width(job))
    states = _sharded(job, shape)
    params = states.params if job.offloads_params and job.zero.offload_param == device else 0
    return (states.optimizer if job.zero.offload_optimizer == device else 0) + params


def step_copies(job: Job, shape: Shape) -> float:
    """Bytes added inside the optimizer step: DeepSpeed's fp32 gradients in 16 bits, and stages 1 and 2 flatten too.

    Plain Adam without DeepSpeed takes all tensors at once (torch/optim/adam.py `_multi_tensor_adam`), with a list of
    intermediates as large as its weights.

    Terms and source lines: zero_recipes/theory/deepspeed_memory.py; `flatten` in zero/stage_1_and_2.py `step`.
    """
    trainable, ranks = shape.trainable, job.world_size
    if job.ds_config is None and job.settings.optim == "adamw_torch":
        return loaded_width(job, shape) * trainable / (ranks if job.is_fsdp else 1)
    if job.ds_config is None or job.zero.offload_optimizer:
        return 0
    weight, master = computed_width(job), 2 if job.zero.bf16_masters else 4
    if job.zero_stage == 0:
        return 0 if weight == 4 else 4 * trainable
    if job.zero_stage == 3:
        return master * min(trainable / ranks, number_in(job.zero.zero, "sub_group_size", 10**9))
    return (master if master == weight else master + weight) * trainable / ranks  # torch's `to` makes no second one


def activation_bytes(job: Job, shape: Shape) -> float:
    """Bytes kept for the backward pass: L layers, or with recomputation L inputs and one layer at work (table 2)."""
    width, tokens = computed_width(job), batch_tokens(job, shape)
    one_input = width * tokens * shape.hidden
    one_layer = layer_bytes(shape, width, tokens, _pairs(job, shape))
    if job.recomputes:
        return shape.layers * one_input + one_layer
    return shape.layers * one_layer + 2 * one_input  # the embedding's output and the last norm's input


def bucket_bytes(job: Job, shape: Shape) -> float:
    """Bytes of reduce buckets and, at stage 3, of parameters gathered for use."""
    if job.world_size == 1 and job.ds_config is None:
        return 0
    if job.is_fsdp:
        return family.fsdp_gathered(shape, computed_width(job))
    if job.ds_config is None:  # torch's DDP keeps a second copy of all gradients: gradient_as_bucket_view is False
        return loaded_width(job, shape) * shape.trainable
    zero, width = {"reduce_bucket_size": DEFAULT_BUCKET} | dict(job.zero.zero), computed_width(job)
    # transformers fills "auto" from the hidden width (integrations/deepspeed.py 232-240)
    bucket = min(number_in(zero, "reduce_bucket_size", shape.hidden**2), shape.trainable)
    if job.zero_stage in (1, 2):
        return (2 if zero.get("overlap_comm") else 1) * width * bucket
    if job.zero_stage == 3:
        live = number_in(zero, "stage3_max_live_parameters", DEFAULT_LIVE)
        largest = shape.vocabulary * shape.hidden
        gathered = min(shape.parameters, max(live, largest)) if job.world_size > 1 else 0
        return width * (bucket + gathered)
    return width * bucket


def loss_head_bytes(job: Job, shape: Shape) -> float:
    """fp32 gradients of the head's weight (V·h, where it is trained) and input (b·s·h): chunked_logprob.py 407-410."""
    trained = shape.vocabulary * shape.hidden if not job.settings.use_peft else 0
    return 4 * trained + 4 * batch_tokens(job, shape) * shape.hidden


def _autocast_copies(job: Job, shape: Shape) -> float:
    """16-bit copies of fp32 weights, which torch.autocast keeps through forward (autocast_mode.cpp, the weight cache).

    Backward needs them too; with recomputation only one layer's at a time, but forward ends with all of them.
    """
    sharded = job.ds_config is not None or job.is_fsdp  # 16-bit weights are gathered, not cast
    if sharded or job.settings.precision == "fp32" or loaded_width(job, shape) != 4:
        return 0
    return 2 * shape.trainable


def host_bytes(job: Job, shape: Shape) -> HostBytes:
    """Per node: weights while loading (below stage 3, unless the file is mapped as it is), and what is offloaded."""
    here, each = job.ranks_per_node, loaded_width(job, shape)
    mapped = not job.settings.random_weights and each == DTYPE_BYTES.get(shape.dtype, 4)
    load = 0 if mapped or job.zero_stage == 3 else here * each * shape.parameters
    share, accumulates = shape.trainable / job.world_size, job.settings.gradient_accumulation_steps > 1
    beside = beside_offloaded_optimizer(job.zero, share, computed_width(job), accumulates)
    largest = shape.vocabulary * shape.hidden / job.world_size
    buffers = sum(swap_buffers(job.zero, share, largest, job.world_size).values())
    held = _offloaded(job, shape, "cpu") + beside + buffers
    saved, optimizer = checkpoint_sizes(job, shape).weights, _saved_by_optimizer(job, shape)
    read = read_at_resume(saved, optimizer, job.zero_stage, job.world_size)
    return HostBytes(load=int(load), training=int(here * held), resume=int(here * (held + read)))


def checkpoint_sizes(job: Job, shape: Shape) -> CheckpointBytes:
    """The saved model or adapter, and a checkpoint that a run can go on from: 14Ψ at stage 3, 16Ψ below."""
    in_16_bits = job.ds_config is not None and job.settings.precision != "fp32"
    each = 2 if in_16_bits else loaded_width(job, shape)
    saved = each * (shape.trainable if job.settings.use_peft else shape.parameters)
    resumable = resumable_bytes(saved, _saved_by_optimizer(job, shape), job.zero_stage)
    return CheckpointBytes(weights=saved, resumable=resumable)


def _saved_by_optimizer(job: Job, shape: Shape) -> int:
    """Bytes of moments, and of the masters that DeepSpeed keeps: at stage 0 in fp32 the weights are their own."""
    if job.ds_config is None or (job.settings.precision == "fp32" and job.zero_stage == 0):
        return 2 * loaded_width(job, shape) * shape.trainable
    return job.zero.adam_bytes * shape.trainable


def _pairs(job: Job, shape: Shape) -> int:
    eager = job.settings.attn_implementation == "eager"
    return shape.heads * batch_tokens(job, shape) * tokens_of(job, shape) if eager else 0


def _notes(job: Job, shape: Shape) -> list[str]:
    notes = []
    if not job.settings.max_length:
        notes.append(
            f"max_length is null: sequences of {shape.positions} tokens, all that the model takes, are assumed."
        )
    if any("experts" in key for key in job.config):
        notes.append(
            "A mixture of experts: tokens are taken to go to all experts alike; a rank that gets more needs more."
        )
    if job.zero.autocast:
        notes.append("torch_autocast: activations are counted in fp32, more than autocast keeps.")
    if job.settings.torch_compile:
        notes.append("torch_compile: fused kernels keep other tensors than these; they are not known.")
    if job.settings.load_in_4bit or job.settings.load_in_8bit:
        notes.append("Quantised weights: what unpacking one layer takes while it computes is not counted.")
    return notes
