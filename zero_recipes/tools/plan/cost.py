"""How long a step takes and what a run costs: a range, from counted FLOPs and bytes, the GPU's figures (hardware.yaml)
and what hosts and links take (times.yaml). benchmarks/planners/ says how many published times the range holds.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero_recipes.config.ds_config import number_in
from zero_recipes.config.recipe import RowLengths, steps_by_epochs
from zero_recipes.core.files import package_yaml
from zero_recipes.core.host import Gpu
from zero_recipes.metrics.flops import squares
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.formulas import DEFAULT_BUCKET, Sizes, shape_of
from zero_recipes.tools.plan.job import Job

Range = tuple[float, float]  # low, high

ADAM_BYTES = 30  # read and written per parameter: master, moments, gradient in; master, moments, 16-bit weight out
UNPACKED_BYTES = 2 + 9 / 16  # read and written per weight of 4 bits, for each product
LONG = 2048  # tokens of one GPU in a pass
LONG_ROW = 16_384  # tokens, from which attention decides
DDP_BUCKET = 25 * 2**20  # bytes; torch's bucket_cap_mb
BY_LENGTH = ("group_by_length", "batch_rebalance")  # train_sampling_strategy: rows of a micro batch are alike
constants = partial(package_yaml, __package__, "times.yaml")


def constant(name: str) -> Any:
    return constants()[name]["value"]


def passes_of(job: Job) -> str:
    """Of times.yaml's `spread`. Short passes leave the host less time than it needs."""
    tokens = job.settings.per_device_train_batch_size * (job.settings.max_length or LONG) / job.sequence_parallel
    return "long passes" if tokens >= LONG else "short passes"


def regime_of(job: Job) -> str:
    """Of times.yaml's `holds`: jobs whose published times were compared together."""
    if job.zero.offloads:
        return "offload"
    return "several machines" if job.world_size > job.gpus_per_node else f"one machine, {passes_of(job)}"


def kinds_of(job: Job, gpu: str) -> set[str]:
    """What times depend on beside the regime: a strategy on a card, the same over long rows, a way of training."""
    zero, settings = job.zero, job.settings
    strategy = job.strategy if job.ds_config is None else f"zero{zero.stage}"
    trained = "QLoRA" if job.quantizes else "LoRA" if settings.use_peft else "full fine-tuning"
    card = f"{strategy} on {gpu}"
    special = {"NVMe": job.on_nvme, "Ulysses": job.sequence_parallel > 1}
    special["ZeRO++"] = zero.hpz_partition_size > 1 or zero.quantizes_weights or zero.quantizes_gradients
    special[f"{card} over rows of 16k tokens"] = (settings.max_length or 0) >= LONG_ROW
    return {card, trained, *(name for name in special if special[name])}


def how_good(job: Job, gpu: Gpu) -> str:
    """What the printed range of a step's time is worth."""
    regime, known = regime_of(job), constants()
    lacking = ", ".join(sorted(kinds_of(job, gpu.name) - {*known["kinds"][regime]}))
    inside, rows, left_out = known["holds"][regime]
    kind = f"published times of this kind ({regime})"
    ending = f"; none of them is for {lacking}" if lacking else ""
    if not lacking and regime in known["blind"]:
        ending = "; {} of {} in a blind test".format(*known["blind"][regime])
    return f"Step: {inside} of {rows} {kind} are in the range, {left_out} if fitted without their source{ending}."


def sequence_of(job: Job, longest: int, rows: RowLengths | None) -> tuple[float, float, float]:
    """(tokens, FLOPs, share) of one sequence, the mean over a run: the first two without padding, the share of FLOPs
    with it in those of a sequence that is `longest`. A padded row is as long as the longest of those drawn with it at
    random. `rows`: None where all are as long as they may be."""
    model, settings = shape_of(job.config, job.settings).flops, job.settings
    full = model.of_rows([longest])
    if rows is None:
        return longest, full, 1.0
    tokens, flops = sum(rows.lengths) / rows.sequences, model.of_rows(rows.lengths) / rows.sequences
    if settings.joined_by or str(settings.train_sampling_strategy) in BY_LENGTH:
        return tokens, flops, flops / full
    ordered, count, together = sorted(rows.lengths), len(rows.lengths), padded_together(job)
    chances = [((i + 1) / count) ** together - (i / count) ** together for i in range(count)]  # of being the longest
    mean = lambda values: sum(chance * value for chance, value in zip(chances, values, strict=True))  # noqa: E731
    padded = [mean(squares(row, window) for row in ordered) for window in model.attention]
    return tokens, flops, model.of_step(mean(ordered), padded) / full


def padded_together(job: Job) -> int:
    """Of how many rows the longest decides: those of a micro batch; those of all ranks where each waits for the others
    in every pass (stages 2 and 3 and FSDP2 send something in each; all do without accumulation)."""
    each_pass = job.zero_stage in (2, 3) or job.is_fsdp or job.settings.gradient_accumulation_steps == 1
    replicas = job.world_size // job.sequence_parallel
    return job.settings.per_device_train_batch_size * (replicas if each_pass else 1)


@dataclass(frozen=True)
class Speed:
    """Of one optimizer step, all ranks at work together. Ranges are (low, high)."""

    step_seconds: Range
    computing: float  # seconds
    communicating: float  # seconds that are not hidden behind the computation
    waiting: float  # seconds of GPUs for Python and launches, beyond what they compute and send meanwhile
    offloading: float  # seconds, none of them hidden
    tokens_per_step: int  # of all ranks, without padding
    mfu: Range

    @property
    def middle(self) -> float:
        return math.sqrt(math.prod(self.step_seconds))  # of a range of factors

    @property
    def tokens_per_second(self) -> Range:
        low, high = self.step_seconds
        return self.tokens_per_step / high, self.tokens_per_step / low


def estimate(job: Job, prediction: Prediction, gpu: Gpu, rows: RowLengths | None = None) -> Speed:
    """`rows`: None where every sequence is taken to be as long as it may be."""
    tokens, flops, computed = sequence_of(job, prediction.max_length, rows)
    peak = gpu.peak_flops("tf32" if prediction.precision == "fp32" and job.settings.tf32 else prediction.precision)
    moved = _memory_bytes(job, prediction) + computed * _activation_bytes(job)
    attention = Sizes(job, shape_of(job.config, job.settings)).kernel_flops()
    computing = computed * (prediction.flops_per_step - attention) / peak / constant("achievable")
    computing += computed * attention / peak / attention_share(job, gpu)
    computing += moved / (gpu.memory_gb_s * 1e9 * constant("memory_share"))
    communicating = _communicating(job, prediction, gpu, computing)
    waiting = max(0.0, _hosting(job) - computing - communicating)
    offloading = _offloading(job, prediction, gpu)
    beside, spread = computing + communicating + waiting, constants()["spread"]
    ends = zip(spread[passes_of(job)], spread["offload"], strict=True)
    low, high = (by_regime * beside + by_host * offloading for by_regime, by_host in ends)
    sequences = prediction.micro_batch_size * prediction.gradient_accumulation_steps / job.sequence_parallel
    used, tokens = sequences * flops / peak, round(sequences * prediction.world_size * tokens)
    return Speed((low, high), computing, communicating, waiting, offloading, tokens, (used / high, used / low))


def attention_share(job: Job, gpu: Gpu) -> float:
    """Of the GPU's peak rate, that the recipe's kernel of attention reaches over long rows. torch's own is
    FlashAttention 2."""
    known = constant("attention")
    shares = known.get(job.settings.attn_implementation, known["flash_attention_2"])
    return shares.get(gpu.name, shares["others"])


def _memory_bytes(job: Job, prediction: Prediction) -> float:
    """What a GPU reads and writes for Adam, and to unpack weights of 4 bits."""
    share = prediction.trainable_parameters / (prediction.world_size if prediction.zero_stage or job.is_fsdp else 1)
    adam = share * ADAM_BYTES if prediction.model_state_bytes.optimizer else 0
    passes = job.settings.gradient_accumulation_steps * (3 if job.recomputes else 2)
    return adam + (passes * UNPACKED_BYTES * prediction.parameters if job.quantizes else 0)


def _activation_bytes(job: Job) -> float:
    """What a GPU reads and writes between matrix products: norms, activations, residuals, scores of eager attention.
    Backward counts twice."""
    shape = shape_of(job.config, job.settings)
    sizes, passes = Sizes(job, shape), job.settings.gradient_accumulation_steps * (3 + job.recomputes)
    inputs = sizes.width * (2 * shape.hidden + shape.ffn)  # of products, whether backward keeps them or not
    layer = sizes.layer(sizes.tokens) + sizes.tokens * (inputs - sizes.inputs())
    return passes * constant("activation_traffic") * shape.layers * layer


def _hosting(job: Job) -> float:
    """Seconds of Python and launches in one step, which goes on beside the GPU's work."""
    shape, stage = shape_of(job.config, job.settings), job.zero_stage or 0
    rounds = 3 if job.recomputes else 2  # forward, backward, recomputation
    times = {
        "layer_seconds": rounds * shape.layers,
        "gather_seconds": rounds * len(shape.tensors) if stage == 3 else 0,
        "reduce_seconds": sum(tensor.trained for tensor in shape.tensors) if stage else 0,
    }
    return job.settings.gradient_accumulation_steps * sum(count * constant(name) for name, count in times.items())


def _communicating(job: Job, prediction: Prediction, gpu: Gpu, computing: float) -> float:
    """Seconds that the computation waits for collectives: ring algorithms over the slowest link between the ranks.
    Between machines rings go through every network card of a machine."""
    ranks, moved = job.world_size, prediction.communication_bytes_per_step
    if ranks == 1:
        return 0.0
    one_node = ranks <= job.gpus_per_node
    bandwidth = 1e9 * (gpu.link_gb_s if one_node else min(gpu.network_gb_s * job.gpus_per_node, gpu.link_gb_s))
    times = {name: 2 if name.startswith("all_reduce") else 1 for name in moved}
    around = {name: times[name] * (ranks - 1) / ranks * size for name, size in moved.items()}
    if not one_node and "all_gather" in around and job.zero.hpz_partition_size > 1:  # backward's stay within a node
        around["all_gather"] *= 1 / 2 + 1 / 2 * bandwidth / (1e9 * gpu.link_gb_s)
    passes = 1 if job.ds_config is None and not job.is_fsdp else job.settings.gradient_accumulation_steps
    calls = {name: max(passes, size / _bytes_of_call(job, name)) for name, size in moved.items() if size}
    each = {
        name: around[name] / bandwidth / constant("link_share") + count * constant("call_seconds")
        for name, count in calls.items()
    }
    # a pass begins with a gather and ends with a reduction, which have no computation beside them
    bare = sum(seconds * passes / calls[name] for name, seconds in each.items())
    return max(bare, sum(each.values()) - window(job) * constant("hidden") * computing)


def _bytes_of_call(job: Job, collective: str) -> float:
    """That one collective sends at most: DDP's and DeepSpeed's buckets; a layer under FSDP2; what stage 3 gathers
    ahead, at least one tensor."""
    shape, zero, width = shape_of(job.config, job.settings), job.zero.zero, 2
    if job.is_fsdp:
        return width * shape.parameters / (shape.layers + 1)
    if job.ds_config is None:
        return DDP_BUCKET
    if not collective.startswith("all_gather"):
        return width * max(
            1, number_in({"reduce_bucket_size": DEFAULT_BUCKET} | zero, "reduce_bucket_size", shape.hidden**2)
        )
    if job.zero_stage == 3:
        ahead = number_in(
            {"stage3_prefetch_bucket_size": 5e7} | zero, "stage3_prefetch_bucket_size", 0.9 * shape.hidden**2
        )
        return width * max(ahead, shape.parameters / len(shape.tensors))
    return width * number_in({"allgather_bucket_size": DEFAULT_BUCKET} | zero, "allgather_bucket_size", DEFAULT_BUCKET)


def window(job: Job) -> float:
    """Share of a step's computation that collectives may go on behind. FSDP2: all of it. DDP reduces behind the last
    backward alone (accelerate's `no_sync`). Not with DeepSpeed 0.19.8: stage 0 reduces after the last backward
    (runtime/engine.py); stages 1 and 2 keep backward waiting for each reduction although overlap_comm is on
    (zero/stage_1_and_2.py `average_tensor`, DeepSpeed#8364), and gather after the step; stage 3 gathers ahead, but in
    published times nothing of its collectives is hidden."""
    if job.ds_config is not None:
        return 0
    backward = 3 / 4 if job.recomputes else 2 / 3  # of forward, backward and recomputation
    return 1 if job.is_fsdp else backward / job.settings.gradient_accumulation_steps


def _offloading(job: Job, prediction: Prediction, gpu: Gpu) -> float:
    """Seconds for what crosses the host link, for Adam on the CPU, and for NVMe; all ranks of a node share these two.
    On NVMe a step reads and writes the optimizer's 12 bytes a parameter and its gradient (4), reads the parameters (2)
    for each forward and backward, and writes them once. Nothing is taken to overlap."""
    here, passes, zero = job.ranks_per_node, prediction.gradient_accumulation_steps, job.zero
    trained, partition = prediction.trainable_parameters / job.world_size, prediction.parameters / job.world_size
    crossing = 2 * trained * (passes + 1) if zero.offload_optimizer else 0.0  # gradients in each pass, weights once
    crossing += 2 * 2 * passes * partition if zero.offload_param else 0  # up for forward and for backward
    updated = trained * here * passes if zero.offload_optimizer else 0  # times.yaml: gradients meet there in each pass
    swapped = 2 * 16 * trained * here if zero.offload_optimizer == "nvme" else 0
    swapped += 2 * (2 * passes + 1) * partition * here if zero.offload_param == "nvme" else 0
    parts = {"host_share": crossing / (gpu.host_gb_s * 1e9), "cpu_adam": updated, "nvme": swapped}
    return sum(size / constant(name) for name, size in parts.items())


@dataclass(frozen=True)
class Cost:
    """Money in the currency of the price, (low, high). `run` and `hours` are None where the steps are not known."""

    per_step: Range
    per_million_tokens: Range
    hours: Range | None
    run: Range | None


def cost(job: Job, speed: Speed, price: float, rows: RowLengths | None = None) -> Cost:
    """`price`: of one GPU for one hour. The run's steps are known from max_steps, or epochs of data at hand."""
    times = lambda values, factor: (values[0] * factor, values[1] * factor)  # noqa: E731
    per_step, steps = times(speed.step_seconds, price * job.world_size / 3600), job.settings.max_steps
    if rows is not None and rows.epoch and steps <= 0:
        steps = steps_by_epochs(rows.epoch, job.settings, job.world_size // job.sequence_parallel)
    hours, run = (times(speed.step_seconds, steps / 3600), times(per_step, steps)) if steps > 0 else (None, None)
    return Cost(per_step, times(per_step, 1e6 / speed.tokens_per_step), hours, run)
