"""A prediction by textbook formulas, in milliseconds: `zero-recipes plan --quick`. The engine's simulation is exact.

Model states: zero_recipes/core/zero_paper.py (arXiv:1910.02054), with what DeepSpeed 0.19.8 adds inside its step
(tests/helpers/state_terms.py names each). Activations: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", arXiv:2205.05198, section 4.1 and table 2, without dropout's masks. Symbols: s tokens, b sequences
in a micro batch, h hidden width, a heads, L layers, V vocabulary. Sizes are bytes of one rank.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from zero_recipes.checks import capacity
from zero_recipes.config.ds_config import number_in
from zero_recipes.core.files import package_yaml
from zero_recipes.core.zero_paper import FP32, MIXED, ModelState, model_state_bytes
from zero_recipes.metrics.flops import squares
from zero_recipes.metrics.schema import PARTS, CheckpointBytes, HostBytes, ModelStateBytes, Prediction, ReservedRange
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.shape import Shape, shape_of

DEFAULT_BUCKET = 500_000_000  # elements; deepspeed/runtime/zero/config.py `reduce_bucket_size`
DEFAULT_LIVE = 1_000_000_000  # elements; `max_live_parameters`
THREADS = 2  # that multiply: the one that runs forward, and autograd's
BEFORE_TRAINING = ("model_loaded", "engine_built")  # of `memory_phases`
NOTE = "By textbook formulas: copies in fp32 inside norms, masks and workspace of kernels are not in the numbers."


@dataclass(frozen=True)
class Overheads:
    """What a GPU holds beside the tensors that a plan counts: bytes, and what its allocator keeps of freed memory."""

    context: tuple[float, float]  # the least and the most
    communicator: float
    own: tuple[float, float]  # what our runs reserve over the allocated peak: the least and the most
    segments: float  # what small ones reserve beyond it
    cached: tuple[float, float]  # what cards show of all programs: the 10th and the 90th percentile
    measured: bool  # whether a GPU showed what every run has; one GPU alone cannot show a communicator

    def beside_segments(self, world_size: int) -> int:
        """Bytes of one GPU that the caching allocator does not know of."""
        return int(self.context[0] + (self.communicator if world_size > 1 else 0))

    def reserved_range(self, allocated: int, world_size: int) -> ReservedRange:
        """What a run shows on its GPU whose tensors take `allocated` bytes at their peak, and what it needs."""
        beside = self.beside_segments(world_size)
        high = allocated * self.own[1] + self.segments + self.context[1] - self.context[0]
        return ReservedRange(low=allocated + beside, high=int(high) + beside)


@cache
def overheads() -> Overheads:
    entries = package_yaml(__package__, "overheads.yaml")
    measured = entries["context"]["measured"] and entries["own"]["measured"]
    return Overheads(**{name: entry["value"] for name, entry in entries.items()}, measured=measured)


class Terms(NamedTuple):
    """What depends on the strategy: bytes of one rank."""

    states: ModelState  # on the GPU at rest
    copies: float  # made inside the optimizer step
    buckets: float  # of reduction, and parameters gathered for use
    moved: dict[str, float]  # full tensors through each collective in one optimizer step
    saved: int  # of the optimizer, in a checkpoint, all ranks together
    on_host: float = 0  # model states in host memory
    on_nvme: int = 0


class Sizes:
    """The terms of one job on one model."""

    def __init__(self, job: Job, shape: Shape):
        self.job, self.shape, self.settings = job, shape, job.settings
        self.ranks, self.passes = job.world_size, job.settings.gradient_accumulation_steps
        requested = (self.settings.model_init_kwargs or {}).get("dtype") or self.settings.dtype
        requested = shape.dtype if requested in ("auto", None) else str(requested).removeprefix("torch.")
        # bytes of an element that is loaded, and of one that is computed with: the same without mixed precision
        self.loaded = capacity.DTYPE_BYTES.get(requested, 4)
        self.width = self.loaded if self.settings.precision == "fp32" else 2
        # and of one that trains where no engine holds masters: PEFT makes adapters fp32, TRL bf16 over packed weights
        # (sft_trainer.py `_is_quantized_model`), accelerate all fp32 (utils/fsdp_utils.py `fsdp2_prepare_model`)
        upcast = self.settings.use_peft or (job.is_fsdp and self.settings.precision != "fp32")
        self.trained = 2 if job.quantizes else 4 if upcast else self.loaded
        self.length = self.settings.max_length or shape.positions
        self.tokens = self.tokens_of(self.settings.per_device_train_batch_size)
        self.gathered = 2 * self.passes * self.stored(self.width)  # bytes of weights, for forward and backward
        self.terms = self._fsdp2() if job.is_fsdp else self._plain() if job.ds_config is None else self._deepspeed()

    def tokens_of(self, batch: int) -> int:
        """One rank's, of so many of the longest sequences."""
        return batch * self.length // self.job.sequence_parallel

    @property
    def linear(self) -> int:
        """Weights that bitsandbytes packs where the recipe has it so: not embedding, head and adapter."""
        shape = self.shape
        adapter = shape.trainable if self.settings.use_peft else 0
        return shape.multiplied - shape.embedding - adapter if self.job.quantizes else 0

    def stored(self, width: int, trained: int = 0) -> float:
        """Bytes of all weights, packed ones without their scales; `trained`: the width of those that train."""
        shape, each = self.shape, 1 / 2 if self.settings.load_in_4bit else 1
        frozen = shape.parameters - shape.trainable - self.linear
        return each * self.linear + width * frozen + (trained or width) * shape.trainable

    @property
    def weights(self) -> int:
        """Bytes of what trains, as a checkpoint has it."""
        in_16_bits = self.job.ds_config is not None and self.settings.precision != "fp32"
        return (2 if in_16_bits else self.trained) * self.shape.trainable

    @property
    def scales(self) -> float:
        """Bytes that unpack weights of 4 bits: fp32 for 64 of them, or nested 8 bits and fp32 for 256 of these
        (arXiv:2305.14314, section 3). They are no parameters: every rank has them all."""
        each = (1 + 4 / 256) / 64 if self.settings.use_bnb_nested_quant else 4 / 64
        return each * self.linear if self.settings.load_in_4bit else 0

    # the terms of a strategy

    def _fsdp2(self) -> Terms:
        """Shards that train are their own master; under accumulation whole gradients stay (accelerate 1.15,
        accelerator.py `no_sync`). Gathered as they are stored: the head (accelerate/utils/fsdp_utils.py
        `fsdp2_prepare_model`), a layer, and the next as it comes; of what trains, the gradients of the head and a layer
        and their copy (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py `foreach_reduce`)."""
        shape, width = self.shape, self.width
        shard = self.trained * shape.trainable / self.ranks
        whole = width * shape.trainable if self.passes > 1 else 0
        ends = shape.parameters - shape.multiplied + shape.embedding
        trained = shape.trainable - (0 if self.settings.use_peft else ends)
        layer = (self.stored(width) - width * ends + width * trained) / shape.layers
        heads = 1 if self.settings.use_peft else 2
        return Terms(
            ModelState(self.stored(self.loaded, self.trained) / self.ranks + self.scales, shard + whole, 2 * shard),
            copies=shard if self.settings.optim == "adamw_torch" else 0,
            buckets=heads * width * shape.embedding + 2 * layer if self.ranks > 1 else 0,
            moved={"all_gather": self.gathered, "reduce_scatter": width * shape.trainable},
            saved=2 * self.trained * shape.trainable,
        )

    def _plain(self) -> Terms:
        """DDP or one process: all keep the dtype of loading, under autocast too. DDP has a second copy of all gradients
        (gradient_as_bucket_view is False); torch's Adam takes all tensors at once, with a list of intermediates as
        large as its weights (torch/optim/adam.py `_multi_tensor_adam`)."""
        trained = self.trained * self.shape.trainable
        return Terms(
            ModelState(self.stored(self.loaded, self.trained) + self.scales, trained, 2 * trained),
            copies=trained if self.settings.optim == "adamw_torch" else 0,
            buckets=trained if self.ranks > 1 else 0,
            moved={"all_reduce": trained},
            saved=2 * trained,
        )

    def _deepspeed(self) -> Terms:
        """The paper's states less what is offloaded. hpZ keeps the weights a second time (arXiv:2306.10209, section
        3.2); ZeRO-Offload moves each gradient to the host as it is reduced (arXiv:2101.06840, section 4.2). In fp32
        stage 0 wraps nothing, and the others keep masters beside weights that are fp32 themselves."""
        job, shape, zero, stage, width = self.job, self.shape, self.job.zero, self.job.zero_stage, self.width
        each = MIXED._replace(optimizer=zero.adam_bytes)
        if self.settings.precision == "fp32":  # weights of 16 bits alone: stage 0 wraps nothing around them either
            each = (
                (MIXED if width == 2 else FP32._replace(optimizer=12)) if stage else ModelState(width, width, 2 * width)
            )
        states = model_state_bytes(shape.parameters, self.ranks, stage, shape.trainable, each)
        states = states._replace(params=self.stored(width) / (self.ranks if stage == 3 else 1) + self.scales)
        sharing, offloaded = zero.hpz_partition_size, zero.offload_optimizer
        params = states.params + (self.stored(width) / sharing if sharing > 1 else 0)
        params_on_host = states.params if job.offloads_params and zero.offload_param == "cpu" else 0
        copies, buckets, moved = self._of_stage(stage)
        return Terms(
            ModelState(0 if job.offloads_params else params, *((0, 0) if offloaded else states[1:])),
            copies=0 if offloaded else copies,
            buckets=width * buckets,
            moved=moved,
            saved=each.optimizer * shape.trainable,
            on_host=(states.optimizer if offloaded == "cpu" else 0) + params_on_host,
            on_nvme=capacity.swapped_bytes(zero, shape.tensors, self.ranks, width),
        )

    def _of_stage(self, stage: int) -> tuple[float, int, dict[str, float]]:
        """(bytes of copies in the step, elements of buckets, bytes through collectives) of DeepSpeed.

        Copies: gradients in the masters' dtype, and those that stages 1 and 2 flatten (stage_1_and_2.py `step`).
        Buckets: transformers fills "auto" from the hidden width (integrations/deepspeed.py 232-240); with overlap_comm
        one fills as another is sent; stage 3 gathers at least the largest tensor. Collectives: 2 and 3 reduce at every
        micro step (deepspeed/runtime/engine.py). ZeRO++ quantises weights to 8 bits, and between nodes gradients to 4.
        """
        shape, zero, width, trainable = self.shape, self.job.zero, self.width, self.shape.trainable
        share, gradients, master = trainable / self.ranks, width * trainable, 2 if zero.bf16_masters else 4
        flat = (master if master == width else master + width) * share
        block = {"reduce_bucket_size": DEFAULT_BUCKET} | dict(zero.zero)
        bucket = min(number_in(block, "reduce_bucket_size", shape.hidden**2), trainable)
        two = 2 * bucket if block.get("overlap_comm") else bucket
        live = max(number_in(block, "stage3_max_live_parameters", DEFAULT_LIVE), shape.embedding)
        live = shape.parameters if self.job.keeps_gathered else live
        gathered = min(self.stored(width) / width, live) if self.ranks > 1 else 0
        reduced = 2 * trainable if zero.autocast else gradients
        across = zero.quantizes_gradients and self.ranks > self.job.gpus_per_node
        whole = self.gathered / (2 if zero.quantizes_weights else 1)
        scattered = self.passes * gradients / (4 if across else 1)
        sub_group = number_in(block, "sub_group_size", 10**9)
        return {
            0: (0 if self.settings.precision == "fp32" else 4 * trainable, bucket, {"all_reduce": gradients}),
            1: (flat, two, {"all_reduce": reduced, "all_gather": gradients}),
            2: (flat, two, {"all_reduce": self.passes * reduced, "all_gather": gradients}),
            3: (master * min(share, sub_group), bucket + gathered, {"all_gather": whole, "reduce_scatter": scattered}),
        }[stage]

    # what comes and goes within a step

    def activations(self) -> float:
        """Kept for the backward pass: L layers, or with recomputation L inputs and one layer at work (table 2)."""
        one_input, one_layer = self.width * self.tokens * self.shape.hidden, self.layer(self.tokens)
        if self.job.recomputes:
            return self.shape.layers * one_input + one_layer
        return self.shape.layers * one_layer + 2 * one_input  # the embedding's output and the last norm's input

    def layer(self, tokens: int) -> float:
        """One layer's activations (section 4.1: 34sbh + 5as²b, less dropout's masks, 2sbh and as²b). Eager attention
        keeps the scores, a·s²·b; fused attention keeps one fp32 sum per head and token."""
        shape, width = self.shape, self.width
        attention = 2 * shape.query_width + 2 * shape.kv_width
        mlp = (3 if shape.gated else 1) * shape.ffn
        scores = (2 * width * self.length if self.is_eager else 4) * shape.heads
        return tokens * (width * (attention + mlp + 2 * shape.hidden) + scores + self.inputs())

    def inputs(self) -> float:
        """Bytes of a token that one layer's products keep of their inputs: the norms' outputs and the MLP's. Frozen
        ones keep none; adapters keep dropout's output and its mask of bytes, or a copy in their own dtype."""
        shape, settings, engine = self.shape, self.settings, self.job.ds_config is not None
        if not (settings.use_peft and (settings.lora_dropout or not (engine or self.job.quantizes))):
            return self.width * (2 * shape.hidden + shape.ffn)
        copies = 2 if engine or self.job.quantizes or settings.precision != "fp32" else 4
        return shape.adapted * (copies + (1 if settings.lora_dropout else 0))

    def phases(self) -> dict[str, dict[str, float]]:
        """{phase: {part: bytes}}. The loss head: fp32 gradients of its weight (V·h) and input (b·s·h). Autocast keeps
        16-bit copies of fp32 weights (autocast_mode.cpp). An evaluation keeps one layer's activations. The best model's
        optimizer states are made before the old ones go."""
        job, shape, settings, states = self.job, self.shape, self.settings, self.terms.states
        casts = job.ds_config is None and not job.is_fsdp and settings.precision != "fp32" and self.loaded == 4
        resting = dict.fromkeys(PARTS, 0) | {"params": states.params, "optimizer": states.optimizer}
        backward = resting | {"grads": states.grads, "activations": self.activations(), "buckets": self.terms.buckets}
        backward["loss_head"] = 4 * (0 if settings.use_peft else shape.embedding) + 4 * self.tokens * shape.hidden
        # bitsandbytes unpacks a weight for each product
        backward["other"] = 2 * shape.trainable if casts else self.width * shape.hidden * shape.ffn * job.quantizes
        grads = states.grads / self.ranks if job.zero_stage == 1 else states.grads  # stage 1 keeps its part of them
        phases = {"backward": backward, "step": resting | {"grads": grads, "other": self.terms.copies}}
        if settings.evaluates:
            tokens = self.tokens_of(settings.per_device_eval_batch_size)
            if job.evaluated is not None:
                tokens = tokens * job.evaluated[0] // self.length
            gathered = self.terms.buckets if job.zero_stage == 3 or job.is_fsdp else 0
            kept = self.layer(tokens) + self.width * tokens * shape.hidden
            phases["evaluation"] = resting | {"activations": kept, "buckets": gathered}
        if settings.load_best_model_at_end and job.ds_config is not None and not job.zero.offload_optimizer:
            again = 8 * shape.trainable / (self.ranks if job.zero_stage else 1)
            phases["best model"] = resting | {"optimizer": states.optimizer + again}
        return phases

    def flops(self) -> int:
        """Of one rank and optimizer step: what metrics/flops.py counts, and the forward pass again with recomputation.
        Eager attention computes the whole square of a row. Kernels compute the half that a causal row looks at, and in
        backward its scores once more (arXiv:2307.08691, section 3.1)."""
        seen = self._squares()
        again = int(self.job.recomputes)
        attention_again = again if self.is_eager else again + 1 / 2
        return int(self.rows * self.shape.flops.of_step(self.length, seen, again, attention_again))

    def kernel_flops(self) -> float:
        """The part of `flops` that a kernel of attention computes."""
        again = int(self.job.recomputes) + 1 / 2
        return 0 if self.is_eager else self.rows * self.shape.flops.of_step(0, self._squares(), 0, again)

    @property
    def is_eager(self) -> bool:
        return self.settings.attn_implementation == "eager"

    @property
    def rows(self) -> float:
        """Of one rank in one optimizer step."""
        return self.tokens * self.passes / self.length

    def _squares(self) -> list[float]:
        """Of one row, by the model's windows."""
        if self.is_eager:
            return [2 * self.length**2 for _ in self.shape.flops.attention]
        return [squares(self.length, window) for window in self.shape.flops.attention]

    def host(self) -> tuple[float, float]:
        """Of one rank, (while loading, in training): weights (below stage 3, unless the file is mapped as it is), and
        what is offloaded."""
        job, shape, share = self.job, self.shape, self.shape.trainable / self.ranks
        mapped = not self.settings.random_weights and self.loaded == capacity.DTYPE_BYTES.get(shape.dtype, 4)
        load = 0 if mapped or job.zero_stage == 3 else self.loaded * shape.parameters
        copies = capacity.beside_offloaded_optimizer(job.zero, share, self.width, self.passes > 1)
        buffers = capacity.swap_buffers(job.zero, share, self.ranks)
        return load, self.terms.on_host + copies + sum(buffers.values())


def add_workspaces(found: dict[str, Any], size: int) -> None:
    """cuBLAS keeps `size` bytes from the first product to the end of the run: training's peaks have them."""
    found["allocated_peak_bytes"] += size
    found["at_peak"]["other"] += size
    for moments in (found.get("peaks", {}), found.get("memory_phases", {})):
        for name in moments:
            if name not in BEFORE_TRAINING:
                moments[name] += size


def prediction_of(job: Job, weights: int, saved: int, host: tuple[float, float], **found: Any) -> Prediction:
    """What formulas or the simulated engine `found`, and what follows from it. `weights`, `saved`: bytes of what trains
    and of the optimizer's states in a checkpoint; `host`: as above."""
    add_workspaces(found, THREADS * job.workspace)
    here, (load, training) = job.ranks_per_node, host
    read = capacity.read_at_resume(weights, saved, job.zero_stage, job.world_size)
    return Prediction(
        strategy=job.strategy,
        zero_stage=job.zero_stage,
        world_size=job.world_size,
        precision=job.precision,
        micro_batch_size=job.settings.per_device_train_batch_size,
        gradient_accumulation_steps=job.settings.gradient_accumulation_steps,
        reserved_bytes=overheads().reserved_range(found["allocated_peak_bytes"], job.world_size),
        host_bytes=HostBytes(
            load=int(here * load), training=int(here * training), resume=int(here * (training + read))
        ),
        checkpoint_bytes=CheckpointBytes(
            weights=weights, resumable=capacity.resumable_bytes(weights, saved, job.zero_stage)
        ),
        **found,
    )


def predict_by_formulas(job: Job) -> Prediction:
    """What `job` needs. Raises Refusal where the model's class cannot be built."""
    sizes = Sizes(job, shape_of(job.config, job.settings))
    shape, terms, phases = sizes.shape, sizes.terms, sizes.phases()
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    at_peak = {part: int(size) for part, size in phases[phase].items()}
    peak = sum(at_peak.values())
    states = terms.states._asdict() | {"offloaded_host": terms.on_host, "offloaded_disk": terms.on_nvme}
    return prediction_of(
        job,
        sizes.weights,
        terms.saved,
        sizes.host(),
        source="formulas",
        parameters=shape.parameters,
        trainable_parameters=shape.trainable,
        max_length=sizes.length,
        allocated_peak_bytes=peak,
        peak_phase=phase,
        at_peak=at_peak,
        model_state_bytes=ModelStateBytes(**{part: int(size) for part, size in states.items()}),
        nvme_bytes=int(job.ranks_per_node * terms.on_nvme),
        communication_bytes_per_step={name: int(size) for name, size in terms.moved.items() if sizes.ranks > 1},
        flops_per_step=sizes.flops(),
        notes=[NOTE],
    )
