"""How long a step takes and what a run costs: a range, from counted FLOPs and bytes and the GPU's figures.

Without a measured run the range is 20 to 30 % to either side where GPUs are joined by NVLink, and wider where the link
or the host decides; `--calibrate metrics.json` takes the share that a measured run reached instead. Not counted: the
launches of many small collectives, of which stage 3 has most.
"""

from dataclasses import dataclass
from pathlib import Path

from zero_recipes.config.recipe import steps_by_epochs
from zero_recipes.core.findings import refusal
from zero_recipes.core.host import Gpu
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.flops import squares
from zero_recipes.metrics.schema import ContractError, Metrics, Prediction, read_part
from zero_recipes.plan.formulas import shape_of
from zero_recipes.plan.job import Job, PlanRequest, job_of
from zero_recipes.plan.predict import Predict

Range = tuple[float, float]  # low, high

LINK_SHARE = (0.5, 0.85)  # of a link's figure that NCCL's rings reach with large messages (NCCL tests' bus bandwidth)
HOST_SHARE = (0.5, 0.8)
HIDDEN = (1 / 2, 1)  # of the computation that a collective may go on behind: NCCL's kernels take cores and memory, too
ADAM_BYTES = 30  # read and written per parameter: master, moments, gradient in; master, moments, 16-bit weight out
MEMORY_SHARE = 0.8
CPU_ADAM = (1.3e9, 3.5e9)  # parameters per second and node: DeepSpeed#7474 on 128 cores; ADAM_BYTES over 105 GB/s
NVME = (3e9, 7e9)  # bytes per second of one PCIe 4 x4 drive; low: as files of single tensors reach
CALIBRATED = 0.10  # to either side of a range that a measured run of the same kind has set
BY_LENGTH = ("group_by_length", "batch_rebalance")  # train_sampling_strategy: rows of a micro batch are alike


def sequence_of(job: Job, longest: int, rows: RowLengths | None) -> tuple[float, float, float]:
    """(tokens, FLOPs, share) of one sequence, the mean over a run: the first two without padding, the share of FLOPs
    with it in those of a sequence that is `longest`. A padded row is as long as the longest of those drawn with it at
    random. `rows`: None where all are as long as they may be."""
    model, settings = shape_of(job.config, job.settings).flops, job.settings
    full = model.of_rows([longest])
    if rows is None:
        return longest, full, 1.0
    tokens, flops = sum(rows.lengths) / rows.sequences, model.of_rows(rows.lengths) / rows.sequences
    if settings.packing or settings.padding_free or str(settings.train_sampling_strategy) in BY_LENGTH:
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
    """Of one optimizer step, all ranks at work together. Seconds are (low, high)."""

    step_seconds: Range
    computing: Range
    communicating: Range  # what is not hidden behind the computation
    offloading: Range
    tokens_per_step: int  # of all ranks, without padding
    mfu: Range

    @property
    def middle(self) -> float:
        return sum(self.step_seconds) / 2

    @property
    def tokens_per_second(self) -> Range:
        low, high = self.step_seconds
        return self.tokens_per_step / high, self.tokens_per_step / low


def estimate(
    job: Job, prediction: Prediction, gpu: Gpu, factor: float | None = None, rows: RowLengths | None = None
) -> Speed:
    """`factor`: from `calibrated`. `rows`: None where every sequence is taken to be as long as it may be."""
    tokens, flops, computed = sequence_of(job, prediction.max_length, rows)
    peak = gpu.peak_flops("tf32" if prediction.precision == "fp32" and job.settings.tf32 else prediction.precision)
    # matrix products, and Adam where it runs on the GPU
    share = prediction.trainable_parameters / (prediction.world_size if prediction.zero_stage else 1)
    on_gpu = share if prediction.model_state_bytes.optimizer else 0
    updated = on_gpu * ADAM_BYTES / (gpu.memory_gb_s * 1e9 * MEMORY_SHARE)
    needed, (slow, fast) = computed * prediction.flops_per_step, gpu.achievable
    computing = needed / (peak * fast) + updated, needed / (peak * slow) + updated
    communicating = _communicating(job, prediction, gpu, computing)
    offloading = _offloading(job, prediction, gpu)
    low, high = (sum(ends) for ends in zip(computing, communicating, offloading, strict=True))
    if factor is not None:
        middle = factor * sum((low, high)) / 2
        low, high = middle * (1 - CALIBRATED), middle * (1 + CALIBRATED)
    sequences = prediction.micro_batch_size * prediction.gradient_accumulation_steps / job.sequence_parallel
    used, tokens = sequences * flops / peak, round(sequences * prediction.world_size * tokens)
    return Speed((low, high), computing, communicating, offloading, tokens, (used / high, used / low))


def _communicating(job: Job, prediction: Prediction, gpu: Gpu, computing: Range) -> Range:
    """Seconds that the computation waits for collectives: ring algorithms, over the slowest link between the ranks."""
    ranks, moved = job.world_size, prediction.communication_bytes_per_step
    one_node = ranks <= job.gpus_per_node
    bandwidth = 1e9 * (gpu.link_gb_s if one_node else min(gpu.network_gb_s, gpu.link_gb_s))
    times = {name: 2 if name.startswith("all_reduce") else 1 for name in moved}
    around = {name: times[name] * (ranks - 1) / ranks * size for name, size in moved.items()}
    if not one_node and "all_gather" in around and job.zero.hpz_partition_size > 1:  # backward's stay within a node
        around["all_gather"] *= 1 / 2 + 1 / 2 * bandwidth / (1e9 * gpu.link_gb_s)
    beside = sum(size for name, size in around.items() if overlaps(job, name))
    bare, behind = sum(around.values()) - beside, window(job)
    low, high = (
        bare / bandwidth / share + max(0.0, beside / bandwidth / share - behind * hidden * seconds)
        for seconds, share, hidden in zip(computing, reversed(LINK_SHARE), reversed(HIDDEN), strict=True)
    )
    return min(low, high), high


def window(job: Job) -> float:
    """Share of a step's computation that collectives may go on behind. Stage 3 and FSDP2: all of it. Others reduce
    behind backward alone, stage 2 in each micro step and the others in the last one (accelerate's `no_sync`)."""
    if job.zero_stage == 3 or job.is_fsdp:
        return 1
    backward = 3 / 4 if job.recomputes else 2 / 3  # of forward, backward and recomputation
    return backward / (1 if job.zero_stage == 2 else job.settings.gradient_accumulation_steps)


def overlaps(job: Job, collective: str) -> bool:
    """Whether `collective` ("all_reduce", "all_gather"...) goes on beside the computation: DDP's and FSDP2's do.

    DeepSpeed 0.19.8: stage 0 reduces after the last backward (runtime/engine.py). Stages 1 and 2 reduce beside backward
    with overlap_comm (zero/stage_1_and_2.py), and gather after the step. Stage 3 (overlap_comm is its default) gathers
    ahead where stage3_prefetch_bucket_size is not 0 (partitioned_param_coordinator.py), and reduces on another stream.
    """
    if job.ds_config is None:
        return True
    zero, gathers = job.zero.zero, collective.startswith("all_gather")
    if job.zero_stage == 3:
        ahead = zero.get("stage3_prefetch_bucket_size") != 0
        return zero.get("overlap_comm", True) is not False and (ahead or not gathers)
    return job.zero_stage in (1, 2) and bool(zero.get("overlap_comm")) and not gathers


def _offloading(job: Job, prediction: Prediction, gpu: Gpu) -> Range:
    """Seconds for what crosses the host link, for Adam on the CPU, and for NVMe; all ranks of a node share these two.
    On NVMe a step reads and writes the optimizer's 12 bytes a parameter and its gradient (4), reads the parameters (2)
    for each forward and backward, and writes them once. Nothing is taken to overlap."""
    here, passes, zero = job.ranks_per_node, prediction.gradient_accumulation_steps, job.zero
    trained, held = prediction.trainable_parameters / job.world_size, prediction.parameters / job.world_size
    crossing = 2 * trained * (passes + 1) if zero.offload_optimizer else 0.0  # gradients in each pass, weights once
    crossing += 2 * 2 * passes * held if zero.offload_param else 0  # up for forward and for backward
    updated = trained * here if zero.offload_optimizer else 0
    swapped = 2 * 16 * trained * here if zero.offload_optimizer == "nvme" else 0
    swapped += 2 * (2 * passes + 1) * held * here if zero.offload_param == "nvme" else 0
    low, high = (crossing / (gpu.host_gb_s * 1e9 * share) for share in reversed(HOST_SHARE))
    return low + updated / CPU_ADAM[1] + swapped / NVME[1], high + updated / CPU_ADAM[0] + swapped / NVME[0]


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


def calibrated(path: Path, request: PlanRequest, predict: Predict) -> float:
    """Measured over estimated seconds of the run whose metrics.json this is, of sequences as long as the measured ones
    were, padding included. Raises Refusal for a run of something else."""
    try:
        run = read_part(Metrics, path)
        if run.status != "ok" or run.device == "cpu" or not (run.tokens_per_second and run.tokens_per_second.all):
            raise ContractError(f"Its status is {run.status}, its device {run.device}.")
    except ContractError as error:
        raise refusal("ZR812", path=path, error=error) from error
    name, model, known = run.strategy, request.recipe.settings.model_name_or_path, request.strategies
    if run.model != model or name not in ("single", *known):
        raise refusal("ZR814", measured=run.model, strategy=name, model=model, strategies=", ".join(known))
    job = job_of(request.recipe, request.config, name, known.get(name), run.world_size).changed(
        per_device_train_batch_size=run.micro_batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        max_length=run.max_length,
    )
    prediction, rows = predict(job), None
    if run.tokens and run.loss_history:
        sequences = estimate(job, prediction, request.gpu).tokens_per_step / prediction.max_length
        mean = run.tokens.all / len(run.loss_history) / sequences
        rows = RowLengths((mean,), 1, None, "measured")
    estimated = estimate(job, prediction, request.gpu, rows=rows)
    return estimated.tokens_per_step / run.tokens_per_second.all / estimated.middle
