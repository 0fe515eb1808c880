"""How long a step takes and what a run costs: a range, from counted FLOPs and bytes and the GPU's figures.

Without a measured run the range is 20 to 30 % to either side where GPUs are joined by NVLink, and wider where the link
or the host decides;
`--calibrate metrics.json` takes the share that a measured run reached instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_recipes.config.recipe import steps_by_epochs
from zero_recipes.core.findings import refusal
from zero_recipes.core.hardware import Gpu
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.parts import Number, Part, StepSeconds, Tokens, TokensPerSecond
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.metrics.schema import LARGEST, ContractError, parse_as, read_as, validate
from zero_recipes.plan import overlap
from zero_recipes.plan.formulas import family
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import PlanRequest, job_of
from zero_recipes.plan.predict import Predict
from zero_recipes.plan.sequences import sequence_of

Range = tuple[float, float]  # low, high

LINK_SHARE = (0.5, 0.85)  # of a link's figure that NCCL's rings reach with large messages (NCCL tests' bus bandwidth)
HOST_SHARE = (0.5, 0.8)
HIDDEN = (1 / 2, 1)  # of the computation that a collective may go on behind: NCCL's kernels take cores and memory, too
ADAM_BYTES = 30  # read and written per parameter: master, moments, gradient in; master, moments, 16-bit weight out
MEMORY_SHARE = 0.8
# parameters per second and node; low: 3.1e9 in 2.4 to 3.1 s on 128 cores (github.com/deepspeedai/DeepSpeed/pull/7474),
# high: ADAM_BYTES a parameter over 105 GB/s of host memory
CPU_ADAM = (1.3e9, 3.5e9)
# bytes per second of one node's NVMe, low and high; one PCIe 4 x4 drive (datasheets: 7 GB/s read, 5 to 7 written), and
# half of it, as files of single tensors reach. A run measures its own disk and keeps it in metrics.json
NVME = (3e9, 7e9)
CALIBRATED = 0.10  # to either side of a range that a measured run of the same kind has set


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


@dataclass(frozen=True)
class Cost:
    """Money in the currency of the price, (low, high). `run` and `hours` are None where the steps are not known."""

    per_step: Range
    per_million_tokens: Range
    hours: Range | None
    run: Range | None


def estimate(
    job: Job, prediction: Prediction, gpu: Gpu, factor: float | None = None, rows: RowLengths | None = None
) -> Speed:
    """`factor`: measured over estimated seconds, from `calibrated`; None without a measured run. `rows`: how long they
    are; None where every sequence is taken to be as long as it may be."""
    each = sequence_of(job, prediction.max_length, rows)
    computing = _computing(job, prediction, gpu, each.computed)
    communicating = _communicating(job, prediction, gpu, computing)
    offloading = _offloading(job, prediction, gpu)
    step = _sum(computing, communicating, offloading)
    if factor is not None:
        middle = factor * sum(step) / 2
        step = (middle * (1 - CALIBRATED), middle * (1 + CALIBRATED))
    sequences = prediction.micro_batch_size * prediction.gradient_accumulation_steps / job.sequence_parallel
    share = sequences * each.flops / _peak(job, prediction, gpu)
    tokens = sequences * prediction.world_size * each.tokens
    return Speed(step, computing, communicating, offloading, round(tokens), (share / step[1], share / step[0]))


def _peak(job: Job, prediction: Prediction, gpu: Gpu) -> float:
    """Dense FLOP/s of the GPU in this run."""
    return gpu.peak_flops("tf32" if prediction.precision == "fp32" and job.settings.tf32 else prediction.precision)


def _computing(job: Job, prediction: Prediction, gpu: Gpu, computed: float) -> Range:
    """`computed`: of what sequences as long as they may be would take."""
    peak = _peak(job, prediction, gpu)
    low, high = gpu.achievable
    updated = _updated_on_gpu(prediction) * ADAM_BYTES / (gpu.memory_gb_s * 1e9 * MEMORY_SHARE)
    flops = computed * prediction.flops_per_step
    return flops / (peak * high) + updated, flops / (peak * low) + updated


def _updated_on_gpu(prediction: Prediction) -> float:
    """Parameters whose Adam runs on one GPU."""
    if prediction.model_state_bytes.optimizer == 0:
        return 0
    return prediction.trainable_parameters / (prediction.world_size if prediction.zero_stage else 1)


def _communicating(job: Job, prediction: Prediction, gpu: Gpu, computing: Range) -> Range:
    """Seconds that the computation waits for collectives: ring algorithms, over the slowest link between the ranks."""
    ranks, moved = job.world_size, prediction.communication_bytes_per_step
    one_node = ranks <= job.gpus_per_node
    bandwidth = 1e9 * (gpu.link_gb_s if one_node else min(gpu.network_gb_s, gpu.link_gb_s))
    around = {
        name: (2 if name.startswith("all_reduce") else 1) * (ranks - 1) / ranks * size for name, size in moved.items()
    }
    if not one_node and "all_gather" in around:  # hpZ: the others take the link within the node
        outside = family.gathers_between_nodes(job)
        around["all_gather"] *= outside + (1 - outside) * bandwidth / (1e9 * gpu.link_gb_s)
    beside = sum(size for name, size in around.items() if overlap.overlaps(job, name))
    bare, window = sum(around.values()) - beside, overlap.window(job)
    ends = zip(computing, reversed(LINK_SHARE), reversed(HIDDEN), strict=True)
    low, high = (
        bare / bandwidth / share + max(0.0, beside / bandwidth / share - window * hidden * seconds)
        for seconds, share, hidden in ends
    )
    return min(low, high), high


def _offloading(job: Job, prediction: Prediction, gpu: Gpu) -> Range:
    """Seconds for what crosses the host link, for Adam on the CPU, and for NVMe; all ranks of a node share these two.

    On NVMe a step reads and writes the optimizer's 12 bytes a parameter and its gradient (4), reads the parameters (2)
    for each forward and backward, and writes them once (docs/strategies.md). Nothing is taken to overlap.
    """
    here, passes = job.ranks_per_node, prediction.gradient_accumulation_steps
    crossing, updated = 0.0, 0.0
    if job.zero.offload_optimizer:
        share = prediction.trainable_parameters / job.world_size
        crossing += 2 * share * (passes + 1)  # gradients down in each pass, weights up once
        updated = share * here
    if job.zero.offload_param:
        crossing += 2 * 2 * passes * prediction.parameters / job.world_size  # up for forward and for backward
    swapped = 0.0
    if job.zero.offload_optimizer == "nvme":
        swapped += 2 * 16 * prediction.trainable_parameters / job.world_size * here
    if job.zero.offload_param == "nvme":
        swapped += 2 * (2 * passes + 1) * prediction.parameters / job.world_size * here
    low, high = (crossing / (gpu.host_gb_s * 1e9 * share) for share in reversed(HOST_SHARE))
    return low + updated / CPU_ADAM[1] + swapped / NVME[1], high + updated / CPU_ADAM[0] + swapped / NVME[0]


def cost(job: Job, speed: Speed, price: float, rows: RowLengths | None = None) -> Cost:
    """`price`: of one GPU for one hour. The run's steps are known from max_steps, or epochs of data at hand; of packed
    rows from `rows`."""
    per_second = price * job.world_size / 3600
    per_step = _times(speed.step_seconds, per_second)
    steps = job.settings.max_steps
    if rows is not None and rows.epoch and not (steps and steps > 0):
        steps = steps_by_epochs(rows.epoch, job.settings, job.world_size // job.sequence_parallel)
    known = steps is not None and steps > 0
    return Cost(
        per_step,
        _times(per_step, 1e6 / speed.tokens_per_step),
        _times(speed.step_seconds, steps / 3600) if known else None,
        _times(per_step, steps) if known else None,
    )


class Calibration(Part):
    """What a calibration reads of a metrics.json."""

    strategy: str
    model: str
    device: str | None
    world_size: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    max_length: int | None
    step_seconds: StepSeconds | None
    tokens_per_second: TokensPerSecond | None = None
    tokens: Tokens | None = None
    loss_history: list[Number] | None = None


def read_measured(path: Path) -> dict[str, Any]:
    """A metrics.json for `--calibrate`. Raises Refusal where it is none of a finished run on a GPU."""
    try:
        measured = parse_as(read_as(path), str(path))
        row = validate(Calibration, measured, str(path))
    except ContractError as error:
        raise refusal("ZR812", path=path, error=error) from error
    seconds, device = row.step_seconds and row.step_seconds.median, row.device
    if not seconds or device == "cpu":
        raise refusal(
            "ZR813",
            path=path,
            why="It was measured on CPU processes." if device == "cpu" else "The run did not finish its steps.",
        )
    needed = {name: getattr(row, name) for name in ("world_size", "micro_batch_size", "gradient_accumulation_steps")}
    needed |= {"tokens_per_second.all": row.tokens_per_second and row.tokens_per_second.all, "step_seconds": seconds}
    needed |= {} if row.max_length is None else {"max_length": row.max_length}
    wrong = next((name for name, value in needed.items() if not value or not 0 < value < LARGEST), None)
    if wrong is not None:
        raise refusal("ZR562", path=path, wrong=wrong, needed=needed[wrong])
    return measured


def calibrated(measured: Mapping[str, Any], request: PlanRequest, predict: Predict) -> float:
    """Measured over estimated seconds of a run of this recipe. Raises Refusal where it is a run of something else."""
    name, strategies = measured["strategy"], request.strategies
    if name != "single" and name not in strategies:
        raise refusal("ZR815", name=name, strategies=", ".join(strategies), next=next(iter(strategies)))
    ranks = measured["world_size"]
    job = _measured_job(measured, job_of(request.recipe, request.config, name, strategies.get(name), ranks))
    return _calibration(measured, job, predict(job), request.gpu)


def _measured_job(measured: Mapping[str, Any], job: Job) -> Job:
    """The job that was measured: `job` with its batch, accumulation, length and number of ranks.

    Raises Refusal for another model or strategy.
    """
    if measured["model"] != job.model or measured["strategy"] != job.strategy:
        raise refusal(
            "ZR814", model=measured["model"], strategy=measured["strategy"], model_2=job.model, strategy_2=job.strategy
        )
    changed = job.changed(
        per_device_train_batch_size=measured["micro_batch_size"],
        gradient_accumulation_steps=measured["gradient_accumulation_steps"],
        max_length=measured["max_length"],
    )
    ranks = measured["world_size"]
    return replace(changed, world_size=ranks, gpus_per_node=min(job.gpus_per_node, ranks))


def _calibration(measured: Mapping[str, Any], job: Job, prediction: Prediction, gpu: Gpu) -> float:
    """Measured over estimated seconds of a step. `job`, `prediction`: of the measured run (`_measured_job`).

    The estimate is of sequences as long as the measured ones were, padding included; where the file does not say how
    many tokens its steps had, as long as they may be.
    """
    tokens, steps = (measured.get("tokens") or {}).get("all"), len(measured.get("loss_history") or [])
    rows = None
    if tokens and steps:
        sequences = estimate(job, prediction, gpu).tokens_per_step / prediction.max_length
        rows = RowLengths((tokens / steps / sequences,), 1, None, "measured")
    estimated = estimate(job, prediction, gpu, rows=rows)
    return estimated.tokens_per_step / measured["tokens_per_second"]["all"] / estimated.middle


def _sum(*ranges: Range) -> Range:
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _times(values: Range, factor: float) -> Range:
    return values[0] * factor, values[1] * factor
