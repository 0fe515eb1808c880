"""A prediction by textbook formulas, in milliseconds: `zero-recipes plan --quick`. The engine's simulation is exact.

Model states: zero_recipes/theory/zero_paper.py (arXiv:1910.02054), with what DeepSpeed 0.19.8 adds inside its step
(zero_recipes/theory/deepspeed.py). Activations: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", arXiv:2205.05198, section 4.1 and table 2, without dropout's masks; widths of grouped queries and
gated MLPs counted in the same way. Symbols: Ψ parameters, N ranks, s tokens in a sequence, b sequences in a micro
batch, h hidden width, a heads, L layers, V vocabulary. Sizes are bytes of one rank.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.checks.lower_bounds import DTYPE_BYTES, beside_offloaded_optimizer, resumable_bytes, swap_buffers
from zero_recipes.config.ds_config import number_in
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.metrics.flops import ModelFlops, active_experts, idle_weights, model_flops
from zero_recipes.metrics.parts import ModelStateBytes, PhaseBytes
from zero_recipes.metrics.prediction import PARTS, CheckpointBytes, HostBytes, Prediction, ReservedRange
from zero_recipes.plan.job import Job
from zero_recipes.theory.deepspeed import SwapTensor, read_at_resume, swapped_bytes
from zero_recipes.theory.zero_paper import ModelState, model_state_bytes, model_state_bytes_fp32

DEFAULT_BUCKET = 500_000_000  # elements; deepspeed/runtime/zero/config.py `reduce_bucket_size`
DEFAULT_LIVE = 1_000_000_000  # elements; `max_live_parameters`
NOTE = "By textbook formulas: copies in fp32 inside norms, masks and workspace of kernels are not in the numbers."


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that formulas need. Counts are elements; widths are elements per token."""

    parameters: int  # LoRA's included
    trainable: int
    multiplied: int  # parameters that take part in matrix products: all but the embedding's rows
    idle: int  # of them, those of a mixture's experts that a token does not go to
    layers: int
    hidden: int
    heads: int
    query_width: int  # heads x head_dim
    kv_width: int  # key and value heads x head_dim, of one of the two
    ffn: int  # of a mixture of experts, of all those that a token goes to
    gated: bool  # the MLP multiplies two projections (SwiGLU and the like)
    vocabulary: int
    positions: int
    dtype: str  # of the weights' file
    flops: ModelFlops
    tensors: tuple[SwapTensor, ...]

    @property
    def embedding(self) -> int:
        """Elements of the head's weight; the largest tensor."""
        return self.vocabulary * self.hidden


def shape_of(config: Mapping[str, Any], settings: Settings) -> Shape:
    """Build the model's class on the meta device, with LoRA's adapter where the recipe has one, and count.

    Raises Refusal where the class cannot be built from the config alone.
    """
    from trl import ModelConfig

    names = {field.name for field in dataclasses.fields(ModelConfig) if field.init}
    values = settings.as_dict()
    model_keys = {key: values[key] for key in sorted(names & values.keys()) if key.startswith(("lora_", "use_"))}
    return _counted(json.dumps(dict(config), sort_keys=True), json.dumps(model_keys, sort_keys=True, default=str))


@lru_cache(maxsize=64)
def _counted(config_json: str, model_keys_json: str) -> Shape:
    from peft import get_peft_model
    from transformers import AutoConfig
    from trl import ModelConfig, get_peft_config

    from zero_recipes.model import build_on_meta

    raw = json.loads(config_json)
    try:
        config = AutoConfig.for_model(**raw)
        model = build_on_meta(config)
        names = [name for name, _ in model.named_parameters()]
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        peft_config = get_peft_config(ModelConfig(**json.loads(model_keys_json)))
        model = model if peft_config is None else get_peft_model(model, peft_config)
    except Exception as error:  # a model's class may raise anything
        raise refusal("ZR817", model_type=raw.get("model_type"), error=first_line(error)) from error
    text = config.get_text_config()
    parameters = sum(p.numel() for p in model.parameters())
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        parameters=parameters,
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        multiplied=parameters if tied else parameters - embedding.numel(),
        idle=idle_weights(model),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        query_width=heads * head_width,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_width,
        ffn=_mlp_width(text),
        gated=any("gate_proj" in name or "gate_up_proj" in name for name in names),
        vocabulary=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", 0),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        flops=model_flops(model),
        tensors=tuple(SwapTensor(p.numel(), p.ndim > 1, p.requires_grad) for p in model.parameters()),
    )


def _mlp_width(config) -> int:
    """Of the MLP that one token passes: of a mixture of experts, of all that it goes to together."""
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    experts, active = active_experts(config)
    if not experts:
        return dense
    each = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return active * each + (shared or (getattr(config, "n_shared_experts", None) or 0) * each)


def tokens_of(job: Job, shape: Shape) -> int:
    """The longest sequence: max_length, or where it is null the positions that the model has."""
    return job.settings.max_length or shape.positions


def batch_tokens(job: Job, shape: Shape) -> int:
    """Of one rank's micro batch."""
    return job.settings.per_device_train_batch_size * tokens_of(job, shape) // job.sequence_parallel


def computed_width(job: Job) -> int:
    """Bytes of an element that is computed with; without autocast and DeepSpeed the weights' own dtype decides."""
    if job.settings.precision != "fp32":
        return 2
    return 4 if job.ds_config is not None else DTYPE_BYTES.get(_requested(job, job.config.get("dtype")), 4)


def loaded_width(job: Job, shape: Shape) -> int:
    """Bytes per parameter of the dtype that the weights are loaded in."""
    return DTYPE_BYTES.get(_requested(job, shape.dtype), 4)


def _requested(job: Job, of_model: str | None) -> str:
    requested = (job.settings.model_init_kwargs or {}).get("dtype") or job.settings.dtype
    return str(of_model if requested in ("auto", None) else requested).removeprefix("torch.")


def predict_by_formulas(job: Job) -> Prediction:
    """What `job` needs. Raises Refusal where the model's class cannot be built."""
    started = time.perf_counter()
    shape = shape_of(job.config, job.settings)
    states = model_states(job, shape)
    phases = _phases(job, shape, states)
    phase, at_peak = max(phases.items(), key=lambda found: sum(found[1].values()))
    at_peak = {part: int(size) for part, size in at_peak.items()}
    peak, backward = sum(at_peak.values()), phases["backward"]
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
        notes=[NOTE, *_notes(job, shape)],
    )


def _phases(job: Job, shape: Shape, states: ModelState) -> dict[str, dict[str, float]]:
    """{phase: {part: bytes}}: backward, the optimizer's step, an evaluation and loading the best model.

    An evaluation keeps no activations: one layer's at a time. The best model's optimizer states are made before the old
    ones go (torch's Optimizer.load_state_dict; transformers asks DeepSpeed for them too).
    """
    settings = job.settings
    empty = dict.fromkeys(PARTS, 0)
    resting = empty | {"params": states.params, "optimizer": states.optimizer}
    backward = empty | states._asdict() | {"activations": activation_bytes(job, shape)}
    backward |= {"buckets": bucket_bytes(job, shape), "loss_head": loss_head_bytes(job, shape)}
    backward["other"] = _autocast_copies(job, shape)
    grads = states.grads / job.world_size if job.zero_stage == 1 else states.grads  # stage 1 keeps its part of them
    phases = {"backward": backward, "step": resting | {"grads": grads, "other": step_copies(job, shape)}}
    if settings.evaluates:
        tokens = settings.per_device_eval_batch_size * tokens_of(job, shape) // job.sequence_parallel
        layer = layer_bytes(job, shape, tokens) + computed_width(job) * tokens * shape.hidden
        gathered = backward["buckets"] if job.zero_stage == 3 or job.is_fsdp else 0
        phases["evaluation"] = resting | {"activations": layer, "buckets": gathered}
    if settings.load_best_model_at_end and job.ds_config is not None and not job.zero.offload_optimizer:
        again = 8 * shape.trainable / (job.world_size if job.zero_stage else 1)
        phases["best model"] = resting | {"optimizer": states.optimizer + again}
    return phases


# model states


def model_states(job: Job, shape: Shape) -> ModelState:
    """Bytes on the GPU at rest; what the ds_config offloads is not there (`_offloaded`)."""
    each, width = loaded_width(job, shape), computed_width(job)
    if job.is_fsdp:  # shards in the dtype of loading are their own master
        shard = each * shape.trainable / job.world_size
        # under accumulation whole gradients stay: accelerate 1.15, accelerator.py `no_sync`, puts their reduction off
        whole = width * shape.trainable if job.settings.gradient_accumulation_steps > 1 else 0
        return ModelState(packed_bytes(job, shape, each) / job.world_size, shard + whole, 2 * shard)
    if job.ds_config is None:  # under autocast weights, gradients and Adam keep the dtype of loading
        return ModelState(packed_bytes(job, shape, each), each * shape.trainable, 2 * each * shape.trainable)
    states, optimizer = _sharded(job, shape), job.zero.offload_optimizer
    sharing = job.zero.hpz_partition_size  # hpZ keeps the weights a second time (arXiv:2306.10209, section 3.2)
    second_copy = width * shape.parameters / sharing if sharing > 1 else 0
    # ZeRO-Offload moves each gradient to the host as it is reduced: arXiv:2101.06840, section 4.2
    return ModelState(
        0 if job.offloads_params else states.params + second_copy,
        0 if optimizer else states.grads,
        0 if optimizer else states.optimizer,
    )


def _sharded(job: Job, shape: Shape) -> ModelState:
    sizes = (shape.parameters, job.world_size, job.zero_stage, shape.trainable)
    if job.settings.precision == "fp32":
        states = model_state_bytes_fp32(*sizes)
        if job.zero_stage:  # DeepSpeed keeps masters beside weights that are fp32 themselves (deepspeed.py)
            states = states._replace(optimizer=1.5 * states.optimizer)
    else:
        states = model_state_bytes(*sizes, job.zero.adam_bytes)
    share = packed_bytes(job, shape, computed_width(job)) / (computed_width(job) * shape.parameters)
    return states._replace(params=share * states.params)


def packed_bytes(job: Job, shape: Shape, width: int) -> float:
    """Bytes of all weights: those of linear layers packed by bitsandbytes where the recipe has it so.

    4 bit: half a byte and an fp32 scale for 64 weights (arXiv:2305.14314, section 3); 8 bit: a byte. Embedding, head
    and LoRA's adapter stay as they are.
    """
    if not job.quantizes:
        return width * shape.parameters
    adapter = shape.trainable if job.settings.use_peft else 0
    linear = shape.multiplied - shape.embedding - adapter
    each = 1 / 2 + 4 / 64 if job.settings.load_in_4bit else 1
    return each * linear + width * (shape.parameters - linear)


def _offloaded(job: Job, shape: Shape, device: str) -> float:
    """Bytes of model states in host memory ("cpu") or on disk ("nvme")."""
    if job.ds_config is None:
        return 0
    if device == "nvme":
        return swapped_bytes(job.zero, shape.tensors, job.world_size, computed_width(job))
    states = _sharded(job, shape)
    params = states.params if job.offloads_params and job.zero.offload_param == device else 0
    return (states.optimizer if job.zero.offload_optimizer == device else 0) + params


# what comes and goes within a step


def step_copies(job: Job, shape: Shape) -> float:
    """Bytes added inside the optimizer step: DeepSpeed's fp32 gradients in 16 bits, and stages 1 and 2 flatten too.

    Plain Adam without DeepSpeed takes all tensors at once (torch/optim/adam.py `_multi_tensor_adam`), with a list of
    intermediates as large as its weights. Terms and source lines: zero_recipes/theory/deepspeed.py; `flatten` in
    zero/stage_1_and_2.py `step`.
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
    tokens = batch_tokens(job, shape)
    one_input, one_layer = computed_width(job) * tokens * shape.hidden, layer_bytes(job, shape, tokens)
    if job.recomputes:
        return shape.layers * one_input + one_layer
    return shape.layers * one_layer + 2 * one_input  # the embedding's output and the last norm's input


def layer_bytes(job: Job, shape: Shape, tokens: int) -> float:
    """One layer's activations (section 4.1: 34sbh + 5as²b, less dropout's masks, 2sbh and as²b).

    Eager attention keeps the scores, a·s²·b; fused attention keeps one fp32 sum per head and token.
    """
    width, is_eager = computed_width(job), job.settings.attn_implementation == "eager"
    attention = width * tokens * (shape.hidden + 2 * shape.query_width + 2 * shape.kv_width)
    scores = (2 * width * tokens_of(job, shape) if is_eager else 4) * shape.heads * tokens
    mlp = width * tokens * (shape.hidden + (4 if shape.gated else 2) * shape.ffn)
    norms = 2 * width * tokens * shape.hidden
    return attention + scores + mlp + norms


def bucket_bytes(job: Job, shape: Shape) -> float:
    """Bytes of reduce buckets and, at stage 3, of parameters gathered for use."""
    width = computed_width(job)
    if job.world_size == 1 and job.ds_config is None:
        return 0
    if job.is_fsdp:
        # embedding and head, which stay so, two layers, one layer's gradients and their copy: the next is gathered
        # while one is at work, and `foreach_reduce` copies gradients into the input of the reduce-scatter
        # (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)
        ends = shape.parameters - shape.multiplied + shape.embedding
        return width * (ends + 4 * ((shape.parameters - ends) / shape.layers))
    if job.ds_config is None:  # torch's DDP keeps a second copy of all gradients: gradient_as_bucket_view is False
        return loaded_width(job, shape) * shape.trainable
    zero = {"reduce_bucket_size": DEFAULT_BUCKET} | dict(job.zero.zero)
    # transformers fills "auto" from the hidden width (integrations/deepspeed.py 232-240)
    bucket = min(number_in(zero, "reduce_bucket_size", shape.hidden**2), shape.trainable)
    if job.zero_stage in (1, 2):
        return (2 if zero.get("overlap_comm") else 1) * width * bucket
    gathered = 0
    if job.zero_stage == 3 and job.world_size > 1:
        live = number_in(zero, "stage3_max_live_parameters", DEFAULT_LIVE)
        gathered = min(shape.parameters, max(live, shape.embedding))
    return width * (bucket + gathered)


def loss_head_bytes(job: Job, shape: Shape) -> float:
    """fp32 gradients of the head's weight (V·h, where it is trained) and input (b·s·h): chunked_logprob.py 407-410."""
    trained = 0 if job.settings.use_peft else shape.embedding
    return 4 * trained + 4 * batch_tokens(job, shape) * shape.hidden


def _autocast_copies(job: Job, shape: Shape) -> float:
    """16-bit copies of fp32 weights, which torch.autocast keeps through forward (autocast_mode.cpp, the weight cache).

    Backward needs them too; with recomputation only one layer's at a time, but forward ends with all of them.
    """
    sharded = job.ds_config is not None or job.is_fsdp  # 16-bit weights are gathered, not cast
    if sharded or job.settings.precision == "fp32" or loaded_width(job, shape) != 4:
        return 0
    return 2 * shape.trainable


# beside the GPU


def host_bytes(job: Job, shape: Shape) -> HostBytes:
    """Per node: weights while loading (below stage 3, unless the file is mapped as it is), and what is offloaded."""
    here, each = job.ranks_per_node, loaded_width(job, shape)
    mapped = not job.settings.random_weights and each == DTYPE_BYTES.get(shape.dtype, 4)
    load = 0 if mapped or job.zero_stage == 3 else here * each * shape.parameters
    share, accumulates = shape.trainable / job.world_size, job.settings.gradient_accumulation_steps > 1
    beside = beside_offloaded_optimizer(job.zero, share, computed_width(job), accumulates)
    buffers = sum(swap_buffers(job.zero, share, shape.embedding / job.world_size, job.world_size).values())
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


# the work of a step


def communication_bytes(job: Job, shape: Shape) -> dict[str, int]:
    """Full tensors through each collective in one optimizer step; DeepSpeed's stages 1 and 2 move 3Φ.

    Stages 2 and 3 reduce at every micro step (deepspeed/runtime/engine.py), stage 3 gathers for each pass. ZeRO++
    quantises weights to 8 bits, and gradients to 4, which DeepSpeed does between nodes only.
    """
    if job.world_size == 1:
        return {}
    width, passes = computed_width(job), job.settings.gradient_accumulation_steps
    gradients, weights = width * shape.trainable, width * shape.parameters
    gathered = {"all_gather": 2 * passes * weights, "reduce_scatter": passes * gradients}
    if job.is_fsdp:
        return gathered | {"reduce_scatter": gradients}
    if job.ds_config is None:
        return {"all_reduce": int(loaded_width(job, shape) * shape.trainable)}
    if job.zero_stage == 0:
        return {"all_reduce": gradients}
    # under torch_autocast linear layers' gradients are reduced in 16 bits; the others, in fp32, are few
    reduced = 2 * shape.trainable if job.zero.autocast else gradients
    if job.zero_stage in (1, 2):
        return {"all_reduce": (passes if job.zero_stage == 2 else 1) * reduced, "all_gather": gradients}
    several_nodes = job.world_size > job.gpus_per_node
    shares = {"all_gather": 1 / 2 if job.zero.quantizes_weights else 1}
    shares["reduce_scatter"] = 1 / 4 if job.zero.quantizes_gradients and several_nodes else 1
    return {name: int(size * shares[name]) for name, size in gathered.items()}


def flops(job: Job, shape: Shape) -> int:
    """Of one rank and optimizer step: 2 per weight and token forward, 4 backward (2 where weights are frozen), 2 again
    with recomputation; attention 4·s·(heads x width) per layer and token and pass (arXiv:2205.05198, appendix A). Of a
    mixture of experts the weights of those that a token goes to."""
    tokens = batch_tokens(job, shape) * job.settings.gradient_accumulation_steps
    again = 1 if job.recomputes else 0
    products = 2 * (shape.multiplied - shape.idle) * tokens * ((2 if job.settings.use_peft else 3) + again)
    attention = 4 * shape.layers * tokens_of(job, shape) * shape.query_width * tokens * (3 + again)
    return int(products + attention)


def _notes(job: Job, shape: Shape) -> list[str]:
    """What these formulas do not know of this job."""
    unlimited = f"max_length is null: sequences of {shape.positions} tokens, all that the model takes, are assumed."
    notes = {
        unlimited: not job.settings.max_length,
        "torch_autocast: activations are counted in fp32, more than autocast keeps.": job.zero.autocast,
    }
    return [note for note, applies in notes.items() if applies]


FILE = Path(__file__).with_name("overheads.yaml")


@dataclass(frozen=True)
class Overheads:
    """Bytes of a CUDA context and of a NCCL communicator, and the factor on the allocator's segments.

    `measured`: whether a GPU showed what every run has; one GPU alone cannot show a communicator.
    """

    context: float
    communicator: float
    fragmentation: float
    measured: bool

    def beside_segments(self, world_size: int) -> int:
        """Bytes of one GPU that the caching allocator does not know of."""
        return int(self.context + (self.communicator if world_size > 1 else 0))

    def reserved_range(self, segments: int, world_size: int) -> ReservedRange:
        """What a process takes of its GPU whose allocator holds `segments` bytes at its peak."""
        beside = self.beside_segments(world_size)
        return ReservedRange(low=segments + beside, high=int(segments * self.fragmentation) + beside)


@cache
def overheads() -> Overheads:
    entries = yaml.safe_load(FILE.read_text())
    measured = entries["context"]["measured"] and entries["fragmentation"]["measured"]
    return Overheads(**{name: entry["value"] for name, entry in entries.items()}, measured=measured)
