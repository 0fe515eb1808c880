"""A prediction by textbook formulas, in milliseconds: `zero-recipes plan --quick`. The engine's simulation is exact.

Model states: arXiv:1910.02054, and what DeepSpeed 0.19.8 adds inside its step (tests/helpers/state_terms.py).
Activations: Korthikanti et al., arXiv:2205.05198, section 4.1 and table 2; eager attention as transformers has it.
Symbols: s tokens, b sequences in a micro batch, h hidden width, a heads, L layers, V vocabulary.
Sizes are bytes of one rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from zero_recipes.checks import capacity
from zero_recipes.config.ds_config import COPIES, number_in
from zero_recipes.config.settings import loaded_dtype
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


@dataclass(frozen=True)
class Overheads:
    """What a GPU holds beside the tensors that a plan counts (overheads.yaml). Ranges are (least, most)."""

    context: tuple[float, float]
    communicator: float
    own: tuple[float, float]
    segments: float
    usable: Mapping[int, float]  # {GiB of a card, at least: share}
    unplanned: Mapping[str, float]  # {source of a prediction: share of its activations, or of its peak}
    cached: tuple[float, float]
    measured: bool  # whether a GPU showed what every run has; one GPU alone cannot show a communicator

    def beside_segments(self, world_size: int) -> int:
        """Bytes that the caching allocator does not know of."""
        return int(self.context[0] + (self.communicator if world_size > 1 else 0))

    def usable_bytes(self, capacity: int) -> int:
        """Bytes of a card that a run's tensors may take at their peak, if it is to fit for sure. `capacity`: bytes."""
        sizes = [size for size in self.usable if size * 2**30 <= capacity]
        return int(self.usable[max(sizes)] * capacity)

    def unplanned_bytes(self, source: str, allocated: int, at_peak: Mapping[str, int]) -> int:
        """Bytes that a run may need beyond the planned peak: the error of the planned activations, or of formulas.

        `source`, `allocated`, `at_peak`: a prediction's; the second is its allocated peak.
        """
        uncertain = allocated if source == "formulas" else at_peak["activations"] + at_peak["loss_head"]
        return int(self.unplanned[source] * uncertain)

    def reserved_range(self, allocated: int, world_size: int) -> ReservedRange:
        """Bound what nvidia-smi shows: from what is needed to what was ever reserved.

        `allocated`: bytes of the tensors at their peak.
        """
        beside = self.beside_segments(world_size)
        high = allocated * self.own[1] + self.segments + self.context[1] - self.context[0]
        return ReservedRange(low=allocated + beside, high=int(high) + beside)


@cache
def overheads() -> Overheads:
    """Read overheads.yaml: GPU memory beside the tensors that a plan counts."""
    entries = package_yaml(__package__, "overheads.yaml")
    values = {name: entry["value"] for name, entry in entries.items()}
    measured = entries["context"]["measured"] and entries["own"]["measured"]
    return Overheads(**values, measured=measured)


def bucket_in(zero: Mapping[str, Any], key: str, default: float, auto: float) -> float:
    """Elements of a bucket. `auto`: what transformers makes of "auto" (integrations/deepspeed.py 232-240)."""
    return number_in({key: default} | zero, key, auto)


class Terms(NamedTuple):
    """What depends on the strategy."""

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
        settings = job.settings
        self.job = job
        self.shape = shape
        self.settings = settings
        self.ranks = job.world_size
        self.trainable = shape.trainable
        self.passes = settings.gradient_accumulation_steps
        self.has_engine = job.ds_config is not None
        self.is_mixed = settings.precision != "fp32"
        self.is_eager = settings.attn_implementation == "eager"
        # bytes of an element: as it is loaded, as it is computed with, as it trains
        self.loaded = self._loaded()
        self.width = 2 if self.is_mixed else self.loaded
        self.trained = self._trained()
        self.length = settings.max_length or shape.positions
        self.tokens = self.tokens_of(settings.per_device_train_batch_size)
        self.terms = self._terms()

    def _loaded(self) -> int:
        return capacity.DTYPE_BYTES.get(loaded_dtype(self.settings, self.shape.dtype), 4)

    def _trained(self) -> int:
        if self.job.quantizes:
            return 2  # TRL: sft_trainer.py `_is_quantized_model`
        if self.settings.use_peft:
            return 4  # PEFT makes adapters fp32
        if self.job.is_fsdp and self.is_mixed:
            return 4  # accelerate: utils/fsdp_utils.py `fsdp2_prepare_model`
        return self.loaded

    def tokens_of(self, batch: int) -> int:
        """Tokens of one rank, of so many of the longest sequences."""
        return batch * self.length // self.job.sequence_parallel

    @property
    def linear(self) -> int:
        """Elements of the weights that bitsandbytes packs."""
        return self.shape.packed if self.job.quantizes else 0

    def stored(self, width: int, trained: int = 0) -> float:
        """Bytes of all weights, without `scales`. `trained`: the width of those that train."""
        packed = self.linear / 2 if self.settings.load_in_4bit else self.linear
        frozen = self.shape.parameters - self.trainable - self.linear
        return packed + width * frozen + (trained or width) * self.trainable

    @property
    def weights(self) -> int:
        """Bytes of what trains, as a checkpoint has it."""
        width = 2 if self.has_engine and self.is_mixed else self.trained
        return width * self.trainable

    @property
    def scales(self) -> float:
        """Bytes that unpack weights of 4 bits, on every rank.

        fp32 for 64 weights, or nested: 8 bits, and fp32 for 256 of these (arXiv:2305.14314, section 3).
        """
        if not self.settings.load_in_4bit:
            return 0
        each = 1 + 4 / 256 if self.settings.use_bnb_nested_quant else 4
        return each / 64 * self.linear

    @property
    def gathered(self) -> float:
        """Bytes in one step, for forward and backward."""
        return 2 * self.passes * self._reached()

    def _reached(self) -> float:
        """Bytes of the weights that a row of text goes through."""
        return self.stored(self.width) - self.width * self.shape.unreached

    def _terms(self) -> Terms:
        if self.has_engine:
            return self._deepspeed()
        if self.job.is_fsdp:
            return self._fsdp2()
        return self._plain()

    def _fsdp2(self) -> Terms:
        """Shards that train are their own master.

        Under accumulation whole gradients stay (accelerate 1.15, accelerator.py `no_sync`).
        Gathered as they are stored: the head (accelerate/utils/fsdp_utils.py `fsdp2_prepare_model`), a layer, the next.
        Of what trains, the gradients of the head and a layer and their copy
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py `foreach_reduce`).
        """
        shape = self.shape
        width = self.width
        shard = self.trained * self.trainable / self.ranks
        whole = width * self.trainable
        gradients = shard + whole if self.passes > 1 else shard
        ends = self._ends()
        heads = 1 if self.settings.use_peft else 2
        in_layers = self._in_layers()
        layer = (self._reached() - width * ends + width * in_layers) / shape.layers
        params = self.stored(self.loaded, self.trained) / self.ranks + self.scales
        return Terms(
            ModelState(params, gradients, 2 * shard),
            copies=self._copies_of_adam(shard),
            buckets=heads * width * shape.embedding + 2 * layer if self.ranks > 1 else 0,
            moved={"all_gather": self.gathered, "reduce_scatter": whole},
            saved=2 * self.trained * self.trainable,
        )

    def _ends(self) -> int:
        """Elements of embedding and head."""
        return self.shape.parameters - self.shape.multiplied + self.shape.embedding

    def _in_layers(self) -> int:
        """Elements that train, of all layers."""
        return self.trainable if self.settings.use_peft else self.trainable - self._ends()

    def _plain(self) -> Terms:
        """In the dtype of loading. DDP copies all gradients (gradient_as_bucket_view is False)."""
        trained = self.trained * self.trainable
        params = self.stored(self.loaded, self.trained) + self.scales
        return Terms(
            ModelState(params, trained, 2 * trained),
            copies=self._copies_of_adam(trained),
            buckets=trained if self.ranks > 1 else 0,
            moved={"all_reduce": trained},
            saved=2 * trained,
        )

    def _copies_of_adam(self, weights: float) -> float:
        """A list of intermediates (torch/optim/adam.py `_multi_tensor_adam`)."""
        return weights if self.settings.optim == "adamw_torch" else 0

    def _deepspeed(self) -> Terms:
        """The paper's states less what is offloaded.

        hpZ keeps the weights a second time (arXiv:2306.10209, section 3.2).
        ZeRO-Offload moves each gradient to the host as it is reduced (arXiv:2101.06840, section 4.2).
        """
        shape = self.shape
        zero = self.job.zero
        each = self._state_widths()
        _, gradients, optimizer = model_state_bytes(shape.parameters, self.ranks, zero.stage, self.trainable, each)
        stored = self.stored(self.width)
        params = stored / (self.ranks if zero.stage == 3 else 1) + self.scales
        copies = self._copies()
        on_host = 0
        if zero.offload_optimizer == "cpu":
            on_host += optimizer
        if zero.offload_optimizer:
            gradients = optimizer = copies = 0
        if self.job.offloads_params:
            if zero.offload_param == "cpu":
                on_host += params
            params = 0
        elif zero.hpz_partition_size > 1:
            params += stored / zero.hpz_partition_size
        return Terms(
            ModelState(params, gradients, optimizer),
            copies=copies,
            buckets=self.width * self._bucket(),
            moved=self._moved(),
            saved=each.optimizer * self.trainable,
            on_host=on_host,
            on_nvme=capacity.swapped_bytes(zero, shape.tensors, self.ranks, self.width),
        )

    def _state_widths(self) -> ModelState:
        """Of a parameter. Without mixed precision stage 0 wraps nothing; others keep masters all the same."""
        if self.is_mixed:
            return MIXED._replace(optimizer=self.job.zero.adam_bytes)
        if self.job.zero_stage == 0:
            return ModelState(self.width, self.width, 2 * self.width)
        return MIXED if self.width == 2 else FP32._replace(optimizer=12)

    def _copies(self) -> float:
        """Gradients in the masters' dtype, and what Adam makes beside them.

        Stages 1 and 2 have flattened gradients there (stage_1_and_2.py `step`), which go before Adam's copies come.
        """
        zero = self.job.zero
        if zero.stage == 0:
            masters = 4 * self.trainable if self.is_mixed else 0
            return masters + self._copies_of_adam(masters or self.width * self.trainable)
        master = 2 if zero.bf16_masters else 4
        share = self.trainable / self.ranks
        if zero.stage == 3:
            stepped = master * min(share, number_in(zero.zero, "sub_group_size", 10**9))
            return stepped + self._copies_of_adam(stepped)
        if master != self.width:
            master += self.width
        return master * share

    def _bucket(self) -> float:
        """Elements. With overlap_comm one fills as another is sent; stage 3 gathers at least the largest tensor.

        A leaf module's gradients stay whole until its backward pass has ended.
        """
        zero = self.job.zero
        bucket = bucket_in(zero.zero, "reduce_bucket_size", DEFAULT_BUCKET, self.shape.hidden**2)
        bucket = min(bucket, self.trainable)
        if zero.stage == 3 and "leaf_module" in zero.zero:
            bucket += self._in_layers() / self.shape.layers
        if zero.stage == 3 and (self.ranks > 1 or self.job.offloads_params):
            live = max(number_in(zero.zero, "stage3_max_live_parameters", DEFAULT_LIVE), self.shape.embedding)
            if self.job.keeps_gathered:
                live = self.shape.parameters
            return bucket + min(self._reached() / self.width, live)
        if zero.stage in (1, 2):
            if zero.zero.get(COPIES) is False:
                return 0
            if zero.zero.get("overlap_comm"):
                return 2 * bucket
        return bucket

    def _moved(self) -> dict[str, float]:
        """Stages 2 and 3 reduce at every micro step (deepspeed/runtime/engine.py).

        ZeRO++ quantises weights to 8 bits, and between nodes gradients to 4.
        """
        zero = self.job.zero
        gradients = self.width * self.trainable
        if zero.stage == 0:
            return {"all_reduce": gradients}
        if zero.stage < 3:
            reduced = 2 * self.trainable if zero.autocast else gradients
            if zero.stage == 2:
                reduced *= self.passes
            to_owners = zero.zero.get("use_multi_rank_bucket_allreduce") is False
            return {"reduce" if to_owners else "all_reduce": reduced, "all_gather": gradients}
        gathered = self.gathered
        scattered = self.passes * gradients
        if zero.quantizes_weights:
            gathered /= 2
        if zero.quantizes_gradients and self.ranks > self.job.gpus_per_node:
            scattered /= 4
        return {"all_gather": gathered, "reduce_scatter": scattered}

    def activations(self) -> float:
        """Bytes kept for backward: L layers, or with recomputation L inputs and one layer (table 2)."""
        one_input = self.width * self.tokens * self.shape.hidden
        one_layer = self.layer(self.tokens)
        if self.job.recomputes:
            return self.shape.layers * one_input + one_layer
        return self.shape.layers * one_layer + 2 * one_input  # the embedding's output and the last norm's input

    def layer(self, tokens: int) -> float:
        """One layer's activations (section 4.1: 34sbh + 5as²b, with dropout's masks, 2sbh and as²b, where it drops).

        Eager attention keeps the scores, a·s²·b; fused attention keeps one fp32 sum per head and token.
        """
        shape = self.shape
        attention = 2 * shape.query_width + 2 * shape.kv_width
        mlp = (3 if shape.gated else 1) * shape.ffn
        kept = self.width * (attention + mlp + 2 * shape.hidden)
        if shape.drops_residual:
            kept += 2 * shape.hidden
        score = self.score() * self.length if self.is_eager else 4
        return tokens * (kept + score * shape.heads + self.inputs())

    def score(self) -> int:
        """Bytes of one score that eager attention keeps, most models of transformers (`eager_attention_forward`).

        softmax keeps what it returns, in fp32. The product with the values keeps that in its own dtype, or as dropout
        returns it; dropout keeps a mask of bytes.
        """
        in_softmax = 4
        if self.shape.drops_scores:
            return in_softmax + 1 + self.width
        return in_softmax + (self.width if self.width < 4 else 0)

    def inputs(self) -> float:
        """Bytes of a token that one layer's products keep: the norms' outputs and the MLP's. Frozen ones keep none.

        Adapters keep dropout's output and its mask of bytes, or a copy in their own dtype.
        """
        drops = self.settings.lora_dropout
        as_stored = self.has_engine or self.job.quantizes
        if not self.settings.use_peft or (as_stored and not drops):
            return self.width * (2 * self.shape.hidden + self.shape.ffn)
        kept = 2 if as_stored or self.is_mixed else 4
        if drops:
            kept += 1
        return self.shape.adapted * kept

    def phases(self) -> dict[str, dict[str, float]]:
        """Bytes on the fullest GPU in each phase, by part."""
        states = self.terms.states
        resting = dict.fromkeys(PARTS, 0) | {"params": states.params, "optimizer": states.optimizer}
        grads = states.grads
        if self.job.zero_stage == 1:
            grads /= self.ranks  # it keeps its part of them
        phases = {
            "backward": resting | self._backward(),
            "step": resting | {"grads": grads, "other": self.terms.copies},
        }
        if self.settings.evaluates:
            tokens = self.tokens_of(self.settings.per_device_eval_batch_size)
            if self.job.evaluated is not None:
                tokens = tokens * self.job.evaluated[0] // self.length
            kept = self.layer(tokens) + self.width * tokens * self.shape.hidden  # one layer's
            gathers = self.job.zero_stage == 3 or self.job.is_fsdp
            buckets = self.terms.buckets if gathers else 0
            phases["evaluation"] = resting | {"activations": kept, "buckets": buckets}
        if self.settings.load_best_model_at_end and self.has_engine and not self.job.zero.offload_optimizer:
            # its optimizer states are made before the old ones go
            again = 8 * self.trainable / (self.ranks if self.job.zero_stage else 1)
            phases["best model"] = resting | {"optimizer": states.optimizer + again}
        return phases

    def _backward(self) -> dict[str, float]:
        """The loss head: fp32 gradients of its weight (V·h) and input (b·s·h)."""
        shape = self.shape
        head = 4 * self.tokens * shape.hidden
        if not self.settings.use_peft:
            head += 4 * shape.embedding
        other = 0
        if self.job.quantizes:
            other = self.width * shape.hidden * shape.ffn  # bitsandbytes unpacks a weight for each product
        by_autocast = self.is_mixed and not self.has_engine and not self.job.is_fsdp
        if by_autocast and self.loaded == 4:
            other = 2 * self.trainable  # it keeps 16-bit copies (autocast_mode.cpp)
        return {
            "grads": self.terms.states.grads,
            "activations": self.activations(),
            "buckets": self.terms.buckets,
            "loss_head": head,
            "other": other,
        }

    def flops(self) -> int:
        """FLOPs of one rank and optimizer step, recomputation included.

        Eager attention computes the whole square of a row.
        Kernels compute its causal half, and in backward the scores once more (arXiv:2307.08691, section 3.1).
        """
        again = int(self.job.recomputes)
        in_attention = again if self.is_eager else again + 1 / 2
        return int(self.rows * self.shape.flops.of_step(self.length, self._squares(), again, in_attention))

    def kernel_flops(self) -> float:
        """FLOPs of a step that a kernel of attention computes."""
        if self.is_eager:
            return 0
        again = int(self.job.recomputes) + 1 / 2
        return self.rows * self.shape.flops.of_step(0, self._squares(), 0, again)

    @property
    def rows(self) -> float:
        """Rows of max_length in a step of one rank; a fraction where its tokens fill no whole row."""
        return self.tokens * self.passes / self.length

    def _squares(self) -> list[float]:
        windows = self.shape.flops.attention
        if self.is_eager:
            return [2 * self.length**2] * len(windows)
        return [squares(self.length, window) for window in windows]

    def host(self) -> tuple[float, float]:
        """Bytes of host memory for each rank, while loading and in training.

        Below stage 3 the weights are loaded there, unless their file is mapped. In training it holds what is offloaded.
        """
        zero = self.job.zero
        is_mapped = not self.settings.random_weights and self.loaded == capacity.DTYPE_BYTES.get(self.shape.dtype, 4)
        load = 0 if is_mapped or self.job.zero_stage == 3 else self.loaded * self.shape.parameters
        share = self.trainable / self.ranks
        copies = capacity.beside_offloaded_optimizer(zero, share, self.width, self.passes > 1)
        buffers = capacity.swap_buffers(zero, share, self.ranks)
        return load, self.terms.on_host + copies + sum(buffers.values())


def add_workspaces(found: dict[str, Any], size: int) -> None:
    """Add cuBLAS's workspaces to a prediction: `size` bytes from the first product on."""
    found["allocated_peak_bytes"] += size
    found["at_peak"]["other"] += size
    for moments in (found.get("peaks", {}), found.get("memory_phases", {})):
        for name in moments:
            if name not in BEFORE_TRAINING:
                moments[name] += size


def prediction_of(job: Job, weights: int, saved: int, host: tuple[float, float], **found: Any) -> Prediction:
    """Make a prediction of what formulas or the simulated engine `found`, and of what follows from it."""
    add_workspaces(found, THREADS * job.workspace)
    load, training = host
    here = job.ranks_per_node
    resume = training + capacity.read_at_resume(weights, saved, job.zero_stage, job.world_size)
    resumable = capacity.resumable_bytes(weights, saved, job.zero_stage)
    return Prediction(
        strategy=job.strategy,
        zero_stage=job.zero_stage,
        world_size=job.world_size,
        precision=job.precision,
        micro_batch_size=job.settings.per_device_train_batch_size,
        gradient_accumulation_steps=job.settings.gradient_accumulation_steps,
        reserved_bytes=overheads().reserved_range(found["allocated_peak_bytes"], job.world_size),
        host_bytes=HostBytes(load=int(here * load), training=int(here * training), resume=int(here * resume)),
        checkpoint_bytes=CheckpointBytes(weights=weights, resumable=resumable),
        **found,
    )


def predict_by_formulas(job: Job) -> Prediction:
    """Predict a job's memory without the simulated engine. Raises Refusal where the model's class cannot be built."""
    sizes = Sizes(job, shape_of(job.config, job.settings))
    terms = sizes.terms
    phases = sizes.phases()
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    at_peak = _whole(phases[phase])
    states = terms.states._asdict() | {"offloaded_host": terms.on_host, "offloaded_disk": terms.on_nvme}
    return prediction_of(
        job,
        sizes.weights,
        terms.saved,
        sizes.host(),
        source="formulas",
        parameters=sizes.shape.parameters,
        trainable_parameters=sizes.shape.trainable,
        max_length=sizes.length,
        allocated_peak_bytes=sum(at_peak.values()),
        peak_phase=phase,
        at_peak=at_peak,
        model_state_bytes=ModelStateBytes(**_whole(states)),
        nvme_bytes=int(job.ranks_per_node * terms.on_nvme),
        communication_bytes_per_step=_whole(terms.moved) if sizes.ranks > 1 else {},
        flops_per_step=sizes.flops(),
        notes=[
            "By textbook formulas: copies in fp32 inside norms, masks and workspace of kernels are not in the numbers."
        ],
    )


def _whole(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: int(size) for name, size in sizes.items()}
