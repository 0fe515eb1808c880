"""How long a step takes and what a run costs: a range, whose accuracy benchmarks/planners/ measures.

From counted FLOPs and bytes, the GPU's figures (hardware.yaml), and what hosts and links take (times.yaml).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero_recipes.config.ds_config import number_in
from zero_recipes.config.row_lengths import RowLengths
from zero_recipes.config.settings import steps_by_epochs
from zero_recipes.core.files import package_yaml
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.zero_paper import paper_volume
from zero_recipes.metrics.flops import squares
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.formulas import DEFAULT_BUCKET, Sizes, bucket_in
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.shape import Shape, shape_of

Range = tuple[float, float]  # low, high

ADAM_BYTES = 30  # read and written per parameter: master, moments, gradient in; master, moments, 16-bit weight out
UNPACKED_BYTES = 2 + 9 / 16  # read and written per weight of 4 bits, for each product
LIKELY_WIDTH = 1.5  # the high end of the likely range over its low end
LONG = 2048  # tokens of one GPU in a pass
SHORT = 1024  # tokens, up to which a pass is short through and through
WIDER = 1.25  # at each end of the range, where no published row is for the card or the way of training
LONG_ROW = 16_384  # tokens, from which attention decides
DDP_BUCKET = 25 * 2**20  # bytes; torch's bucket_cap_mb
BY_LENGTH = ("group_by_length", "batch_rebalance")  # train_sampling_strategy: rows of a micro batch are alike
constants = partial(package_yaml, __package__, "times.yaml")


def constant(name: str) -> Any:
    """Look up a value of times.yaml."""
    return constants()[name]["value"]


def passes_of(job: Job) -> str:
    """Name the job's passes as times.yaml's `spread` does. Short ones leave the host less time than it needs."""
    return "long passes" if tokens_of_pass(job) >= LONG else "short passes"


def tokens_of_pass(job: Job) -> float:
    """Tokens of one GPU in a pass."""
    return job.settings.per_device_train_batch_size * (job.settings.max_length or LONG) / job.sequence_parallel


def of_passes(values: Mapping[str, float], job: Job) -> float:
    """A factor of times.yaml's long and short passes for this job's: between SHORT and LONG tokens between the two."""
    share = math.log(tokens_of_pass(job) / SHORT, LONG / SHORT)
    share = min(1.0, max(0.0, share))
    return values["long passes"] ** share * values["short passes"] ** (1 - share)


def regime_of(job: Job) -> str:
    """Name the job's regime as times.yaml's `holds` does: jobs whose published times were compared together."""
    if job.zero.offloads:
        return "offload"
    if job.world_size > job.gpus_per_node:
        return "several machines"
    return f"one machine, {passes_of(job)}"


def kinds_of(job: Job, gpu: str) -> set[str]:
    """What times depend on beside the regime."""
    zero = job.zero
    strategy = job.strategy
    if job.ds_config is not None:
        strategy = f"zero{zero.stage}"
    card = f"{strategy} on {gpu}"
    has_adapter = job.quantizes or job.settings.use_peft
    special = {
        "QLoRA": job.quantizes,
        "LoRA": has_adapter and not job.quantizes,
        "full fine-tuning": not has_adapter,
        "NVMe": job.on_nvme,
        "Ulysses": job.sequence_parallel > 1,
        "ZeRO++": zero.hpz_partition_size > 1 or zero.quantizes_weights or zero.quantizes_gradients,
        f"{card} over rows of 16k tokens": (job.settings.max_length or 0) >= LONG_ROW,
    }
    return {card, *(name for name in special if special[name])}


def without_rows(job: Job, gpu: Gpu) -> set[str]:
    """Of its kinds, those that no published time of its regime is for."""
    return kinds_of(job, gpu.name).difference(constants()["kinds"][regime_of(job)])


def how_good(job: Job, gpu: Gpu) -> str:
    """What the printed ranges of a step's time are worth, for a source that they were not fitted to."""
    regime = regime_of(job)
    *_, rows, likely, whole = constants()["holds"][regime]
    lacking = ", ".join(sorted(without_rows(job, gpu)))
    ending = f"; none is for {lacking}: {WIDER:g} times wider" if lacking else ""
    kind = f"{rows} published times ({regime})"
    return f"{likely} of {kind} are in the likely range, {whole} in the whole{ending}."


def sequence_of(job: Job, longest: int, rows: RowLengths | None) -> tuple[float, float, float]:
    """Average (tokens, FLOPs, share) of one sequence over a run, without padding.

    The share: of FLOPs with padding in those of a sequence that is `longest`.
    A padded row is as long as the longest of those drawn with it at random.
    """
    model = shape_of(job.config, job.settings).flops
    full = model.of_rows([longest])
    if rows is None:
        return longest, full, 1.0
    tokens = sum(rows.lengths) / rows.sequences
    flops = model.of_rows(rows.lengths) / rows.sequences
    if job.settings.joined_by or str(job.settings.train_sampling_strategy) in BY_LENGTH:
        return tokens, flops, flops / full
    ordered = sorted(rows.lengths)
    count = len(ordered)
    together = padded_together(job)
    chances = [((i + 1) / count) ** together - (i / count) ** together for i in range(count)]  # of being the longest

    def mean(values: Iterable[float]) -> float:
        return sum(chance * value for chance, value in zip(chances, values, strict=True))

    padded = [mean(squares(row, window) for row in ordered) for window in model.attention]
    return tokens, flops, model.of_step(mean(ordered), padded) / full


def padded_together(job: Job) -> int:
    """Count the rows that the longest decides for: those of all ranks where something is sent in every pass."""
    rows = job.settings.per_device_train_batch_size
    if job.zero_stage in (2, 3) or job.is_fsdp or job.settings.gradient_accumulation_steps == 1:
        rows *= job.world_size // job.sequence_parallel
    return rows


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step, all ranks at work together."""

    step_seconds: Range
    computing: float
    communicating: float  # not hidden behind the computation
    waiting: float  # of GPUs for Python and launches
    offloading: float  # none of it hidden
    tokens_per_step: int  # of all ranks, without padding
    mfu: Range
    middle: float  # the middle of the likely range, in seconds of a step

    @property
    def likely(self) -> Range:
        """Seconds of a step that are likely: a range of LIKELY_WIDTH around the middle, within the whole range."""
        low, high = self.step_seconds
        factor = math.sqrt(LIKELY_WIDTH)
        return max(low, self.middle / factor), min(high, self.middle * factor)

    @property
    def tokens_per_second(self) -> Range:
        """Tokens of all ranks a second, from the slow end to the fast one."""
        low, high = self.step_seconds
        return self.tokens_per_step / high, self.tokens_per_step / low


def estimate(job: Job, prediction: Prediction, gpu: Gpu, rows: RowLengths | None = None) -> Speed:
    """Estimate how long a step takes on the GPU.

    `rows`: None where every sequence is taken to be as long as it may be.
    """
    tokens, flops, share = sequence_of(job, prediction.max_length, rows)
    precision = prediction.precision
    if precision == "fp32" and job.settings.tf32:
        precision = "tf32"
    peak = gpu.peak_flops(precision)
    computing = _computing(job, prediction, gpu, share, peak)
    communicating = _communicating(job, prediction, gpu, computing)
    waiting = max(0.0, _hosting(job) - computing - communicating)
    offloading = _offloading(job, prediction, gpu)
    beside = computing + communicating + waiting
    least, most = ({kind: ends[i] for kind, ends in constants()["spread"].items()} for i in (0, 1))
    wider = WIDER if without_rows(job, gpu) else 1
    low = (of_passes(least, job) * beside + least["offload"] * offloading) / wider
    high = (of_passes(most, job) * beside + most["offload"] * offloading) * wider
    centre = constants()["centre"]
    middle = of_passes(centre, job) * beside + centre["offload"] * offloading
    sequences = prediction.micro_batch_size * prediction.gradient_accumulation_steps / job.sequence_parallel
    used = sequences * flops / peak
    return Speed(
        (low, high),
        computing,
        communicating,
        waiting,
        offloading,
        tokens_per_step=round(sequences * prediction.world_size * tokens),
        mfu=(used / high, used / low),
        middle=middle,
    )


def _computing(job: Job, prediction: Prediction, gpu: Gpu, share: float, peak: float) -> float:
    """Seconds. `share`: by `sequence_of`. `peak`: FLOPs per second."""
    sizes = Sizes(job, shape_of(job.config, job.settings))
    attention = sizes.kernel_flops()
    known = constant("attention")
    reached = known.get(job.settings.attn_implementation, known["flash_attention_2"])  # which torch's own is too
    products = _of_card("products", gpu) * constant("achievable")
    seconds = share * (prediction.flops_per_step - attention) / peak / products
    seconds += share * attention / peak / reached.get(gpu.name, reached["others"])
    moved = _memory_bytes(job, prediction) + share * _activation_bytes(sizes)
    return seconds + moved / (gpu.memory_gb_s * 1e9 * constant("memory_share"))


def _of_card(name: str, gpu: Gpu) -> float:
    """A value of times.yaml that has one for each card."""
    values = constant(name)
    return values.get(gpu.name, values["others"])


def _memory_bytes(job: Job, prediction: Prediction) -> float:
    """Read and written for Adam, and to unpack weights of 4 bits."""
    moved = 0
    if prediction.model_state_bytes.optimizer:
        ranks = prediction.world_size if prediction.zero_stage or job.is_fsdp else 1
        moved += prediction.trainable_parameters / ranks * ADAM_BYTES
    if job.quantizes:
        products = job.settings.gradient_accumulation_steps * _rounds(job)
        moved += products * UNPACKED_BYTES * prediction.parameters
    return moved


def _rounds(job: Job) -> int:
    return 3 if job.recomputes else 2  # forward, backward, recomputation


def _activation_bytes(sizes: Sizes) -> float:
    """Read and written between products: norms, activations, residuals, scores of eager attention."""
    shape = sizes.shape
    passes = sizes.passes * (_rounds(sizes.job) + 1)  # backward counts twice
    inputs = sizes.width * (2 * shape.hidden + shape.ffn)  # of products, whether backward keeps them or not
    layer = sizes.layer(sizes.tokens) + sizes.tokens * (inputs - sizes.inputs())
    return passes * constant("activation_traffic") * shape.layers * layer


def _hosting(job: Job) -> float:
    """Seconds of Python and launches in one step."""
    shape = shape_of(job.config, job.settings)
    rounds = _rounds(job)
    each = shape.layers * constant("layer_seconds")
    if job.settings.use_peft:
        each += _adapters(shape) * constant("adapter_seconds")
    if job.quantizes:
        each += _packed_tensors(shape) * constant("unpack_seconds")
    if job.is_fsdp and job.world_size > 1:
        each += shape.layers * constant("shard_seconds")
    seconds = rounds * each
    if job.zero_stage == 3:
        hooks = rounds * len(shape.tensors) * constant("gather_seconds")
        if "leaf_module" in job.zero.zero:
            hooks *= constant("leaf_share")
        seconds += hooks
    if job.zero_stage:
        seconds += sum(tensor.trained for tensor in shape.tensors) * constant("reduce_seconds")
    return job.settings.gradient_accumulation_steps * seconds


def _adapters(shape: Shape) -> float:
    """How many adapters all layers have: of two matrices each."""
    return sum(tensor.trained and tensor.is_matrix for tensor in shape.tensors) / 2


def _packed_tensors(shape: Shape) -> int:
    """How many weights bitsandbytes unpacks: frozen matrices, without the embedding and the head."""
    frozen = [tensor for tensor in shape.tensors if tensor.is_matrix and not tensor.trained]
    return sum(tensor.size != shape.embedding for tensor in frozen)


def _communicating(job: Job, prediction: Prediction, gpu: Gpu, computing: float) -> float:
    """Seconds that the computation waits for collectives: rings over the slowest link between the ranks.

    Between machines they go through every network card of a machine.
    """
    ranks = job.world_size
    if ranks == 1:
        return 0.0
    bandwidth = gpu.link_gb_s
    if ranks > job.gpus_per_node:
        bandwidth = min(gpu.network_gb_s * job.gpus_per_node, bandwidth)
    bandwidth *= 1e9
    passes = job.settings.gradient_accumulation_steps
    if job.ds_config is None and not job.is_fsdp:
        passes = 1
    total = bare = 0  # a pass begins with a gather and ends with a reduction, which have no computation beside them
    for name, size in prediction.communication_bytes_per_step.items():
        if not size:
            continue
        times = 2 if name.startswith("all_reduce") else 1
        around = times * (ranks - 1) / ranks * size
        if name == "reduce":
            around = size  # a chain that ends at the owner: no other link is at work meanwhile
        across = _share_across_machines(job, name)
        around *= across + (1 - across) * bandwidth / (1e9 * gpu.link_gb_s)
        calls = max(passes, size / _bytes_of_call(job, name))
        seconds = around / bandwidth / constant("link_share") + calls * constant("call_seconds")
        total += seconds
        bare += seconds * passes / calls
    return max(bare, total - window(job) * constant("hidden") * computing)


def _share_across_machines(job: Job, collective: str) -> float:
    """The share of a collective's bytes that goes between machines. Under hpZ, backward's gathers stay within one."""
    stays = collective == "all_gather" and job.zero.hpz_partition_size > 1
    return 1 / 2 if stays else 1.0


def bytes_across_machines(job: Job, prediction: Prediction) -> float:
    """Bytes of a step's collectives that go between machines, counted as in the ZeRO paper; 0 on one machine."""
    if job.world_size <= job.gpus_per_node:
        return 0.0
    volumes = prediction.communication_bytes_per_step
    return sum(paper_volume({name: size}) * _share_across_machines(job, name) for name, size in volumes.items())


def _bytes_of_call(job: Job, collective: str) -> float:
    """That one collective sends at most. Two bytes an element."""
    shape = shape_of(job.config, job.settings)
    zero = job.zero.zero
    if job.is_fsdp:
        return 2 * shape.parameters / (shape.layers + 1)  # a layer
    if job.ds_config is None:
        return DDP_BUCKET
    if not collective.startswith("all_gather"):
        return 2 * max(1, bucket_in(zero, "reduce_bucket_size", DEFAULT_BUCKET, shape.hidden**2))
    if job.zero_stage == 3:
        ahead = bucket_in(zero, "stage3_prefetch_bucket_size", 5e7, 0.9 * shape.hidden**2)
        return 2 * max(ahead, shape.parameters / len(shape.tensors))
    return 2 * number_in(zero, "allgather_bucket_size", DEFAULT_BUCKET)


def window(job: Job) -> float:
    """Share of a step's computation that collectives may go on behind.

    FSDP2: all of it. DDP: the last backward (accelerate's `no_sync`).
    DeepSpeed 0.19.8: nothing. Stage 0 reduces after backward (runtime/engine.py). Stages 1 and 2 let backward wait for
    each reduction (zero/stage_1_and_2.py `average_tensor`, DeepSpeed#8364). Stage 3 hides nothing in published times.
    """
    if job.ds_config is not None:
        return 0
    if job.is_fsdp:
        return 1
    backward = 3 / 4 if job.recomputes else 2 / 3  # of forward, backward and recomputation
    return backward / job.settings.gradient_accumulation_steps


def _offloading(job: Job, prediction: Prediction, gpu: Gpu) -> float:
    """Seconds for the host link, for Adam on the CPU, and for NVMe; all ranks of a node share the last two.

    NVMe: a step reads and writes 12 bytes of optimizer and 4 of gradient a parameter, reads its 2 for each forward and
    backward, and writes them once. Nothing overlaps.
    """
    zero = job.zero
    here = job.ranks_per_node
    passes = prediction.gradient_accumulation_steps
    trained = prediction.trainable_parameters / job.world_size
    partition = prediction.parameters / job.world_size
    crossing = updated = swapped = 0
    if zero.offload_optimizer:
        crossing += 2 * trained * (passes + 1)  # gradients in each pass, weights once
        updated = trained * here * passes  # times.yaml: gradients meet there in each pass
    if zero.offload_param:
        crossing += 2 * 2 * passes * partition  # up for forward and for backward
    if zero.offload_optimizer == "nvme":
        swapped += 2 * 16 * trained * here
    if zero.offload_param == "nvme":
        swapped += 2 * (2 * passes + 1) * partition * here
    seconds = crossing / (gpu.host_gb_s * 1e9) / constant("host_share")
    return seconds + updated / constant("cpu_adam") + swapped / nvme_bytes_per_second(gpu)


def nvme_bytes_per_second(gpu: Gpu) -> float:
    """Bytes per second of one machine's disks: as requested, else of one drive."""
    return 1e9 * gpu.nvme_gb_s if gpu.nvme_gb_s else constant("nvme")


@dataclass(frozen=True)
class Cost:
    """Money in the currency of the price."""

    per_step: Range
    per_million_tokens: Range
    hours: Range | None  # None where the steps are not known
    run: Range | None


def cost(job: Job, speed: Speed, price: float, rows: RowLengths | None = None) -> Cost:
    """Compute what a step, a million tokens and the run cost. `price`: of one GPU for one hour."""
    per_step = _times(speed.step_seconds, price * job.world_size / 3600)
    per_million = _times(per_step, 1e6 / speed.tokens_per_step)
    steps = job.settings.max_steps
    if steps <= 0 and rows is not None and rows.epoch:
        steps = steps_by_epochs(rows.epoch, job.settings, job.world_size // job.sequence_parallel)
    if steps <= 0:
        return Cost(per_step, per_million, None, None)
    return Cost(per_step, per_million, _times(speed.step_seconds, steps / 3600), _times(per_step, steps))


def _times(values: Range, factor: float) -> Range:
    low, high = values
    return low * factor, high * factor
