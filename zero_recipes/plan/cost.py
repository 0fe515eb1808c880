"""How long a step takes and what a run costs: a range, from counted FLOPs and bytes and the GPU's figures.

Without a measured run the range is 20 to 30 % to either side where GPUs are joined by NVLink, and wider where the link
or the host decides; `--calibrate metrics.json` takes the share that a measured run reached instead.

Which collectives go on while the GPU computes, by what the libraries do:
- DeepSpeed 0.19.8, stage 0: runtime/engine.py `allreduce_gradients` reduces after the last backward; nothing overlaps.
- stages 1 and 2: with `overlap_comm` a hook reduces each full bucket on a stream of its own while backward goes on
  (zero/stage_1_and_2.py `process_gradients`, `average_tensor`); stage 1 in the last micro step only, stage 2 in each.
  Without it the reduction is in backward's own stream, or after it. The all-gather of the updated weights comes after
  the optimizer's step (`step`, `all_gather_dp_groups`), where there is nothing to hide behind.
- stage 3: with `overlap_comm` (its default) weights are gathered ahead on a stream of their own in forward and backward
  (zero/partitioned_param_coordinator.py `fetch_sub_module`) where `stage3_prefetch_bucket_size` is not 0, and gradients
  reduced on another (zero/stage3.py `reduce_and_partition_stream`).
- torch 2.13: DDP reduces each bucket during backward, under accumulation in the last micro step only (accelerate's
  `no_sync`); FSDP2 gathers the next layer while one is at work, and reduces like DDP.
Not counted: the launches of many small collectives, and the hooks in Python that start them; stage 3 has most of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_recipes.config.recipe import steps_by_epochs
from zero_recipes.core.findings import refusal
from zero_recipes.core.host import Gpu
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.flops import ModelFlops, squares
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.formulas import shape_of
from zero_recipes.plan.job import Job, PlanRequest, job_of
from zero_recipes.plan.predict import Predict

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
BY_LENGTH = ("group_by_length", "batch_rebalance")  # train_sampling_strategy: rows of a micro batch are alike


# one sequence of a micro batch


@dataclass(frozen=True)
class OneSequence:
    """The mean over a run. `tokens`, `flops` (metrics/flops.py): without padding; `places`: tokens with padding;
    `computed`: FLOPs with padding, as a share of those of a sequence that is as long as it may be."""

    tokens: float
    places: float
    flops: float
    computed: float


def sequence_of(job: Job, longest: int, rows: RowLengths | None) -> OneSequence:
    """`longest`: tokens that a sequence may have; `rows`: None where all have as many.

    Raises Refusal where the model's class cannot be built.
    """
    model = shape_of(job.config, job.settings).flops
    full = model.of_rows([longest])
    if rows is None:
        return OneSequence(longest, longest, full, 1.0)
    tokens, flops = sum(rows.lengths) / rows.sequences, model.of_rows(rows.lengths) / rows.sequences
    if not pads(job):
        return OneSequence(tokens, longest if job.settings.packing else tokens, flops, flops / full)
    places, padded = _padded(model, rows.lengths, padded_together(job))
    return OneSequence(tokens, places, flops, padded / full)


def pads(job: Job) -> bool:
    """Whether a micro batch is as long as its longest row."""
    alike = str(job.settings.train_sampling_strategy) in BY_LENGTH
    return not (job.settings.packing or job.settings.padding_free or alike)


def padded_together(job: Job) -> int:
    """Of how many rows the longest decides: those of a micro batch; those of all ranks where each waits for the others
    in every pass (stages 2 and 3 and FSDP2 send something in each; all do without accumulation)."""
    each_pass = job.zero_stage in (2, 3) or job.is_fsdp or job.settings.gradient_accumulation_steps == 1
    replicas = job.world_size // job.sequence_parallel
    return job.settings.per_device_train_batch_size * (replicas if each_pass else 1)


def _padded(model: ModelFlops, lengths: Sequence[float], together: int) -> tuple[float, float]:
    """(tokens, FLOPs) of one row that is padded to the longest of `together` rows drawn at random, the mean."""
    ordered = sorted(lengths)
    count = len(ordered)
    chances = [((i + 1) / count) ** together - (i / count) ** together for i in range(count)]  # of being the longest
    places = sum(chance * length for chance, length in zip(chances, ordered, strict=True))
    squared = [
        sum(chance * squares(length, window) for chance, length in zip(chances, ordered, strict=True))
        for window in model.attention
    ]
    return places, model.of_step(places, squared)


# a step


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
    """`factor`: measured over estimated seconds, from `calibrated`; None without a measured run. `rows`: how long they
    are; None where every sequence is taken to be as long as it may be."""
    each = sequence_of(job, prediction.max_length, rows)
    computing = _computing(job, prediction, gpu, each.computed)
    communicating = _communicating(job, prediction, gpu, computing)
    offloading = _offloading(job, prediction, gpu)
    low, high = (sum(ends) for ends in zip(computing, communicating, offloading, strict=True))
    if factor is not None:
        middle = factor * sum((low, high)) / 2
        low, high = middle * (1 - CALIBRATED), middle * (1 + CALIBRATED)
    sequences = prediction.micro_batch_size * prediction.gradient_accumulation_steps / job.sequence_parallel
    share = sequences * each.flops / _peak(job, prediction, gpu)
    tokens = sequences * prediction.world_size * each.tokens
    return Speed((low, high), computing, communicating, offloading, round(tokens), (share / high, share / low))


def _peak(job: Job, prediction: Prediction, gpu: Gpu) -> float:
    """Dense FLOP/s of the GPU in this run."""
    return gpu.peak_flops("tf32" if prediction.precision == "fp32" and job.settings.tf32 else prediction.precision)


def _computing(job: Job, prediction: Prediction, gpu: Gpu, computed: float) -> Range:
    """Matrix products, and Adam where it runs on the GPU. `computed`: as of OneSequence."""
    peak, (low, high) = _peak(job, prediction, gpu), gpu.achievable
    share = prediction.trainable_parameters / (prediction.world_size if prediction.zero_stage else 1)
    on_gpu = share if prediction.model_state_bytes.optimizer else 0
    updated = on_gpu * ADAM_BYTES / (gpu.memory_gb_s * 1e9 * MEMORY_SHARE)
    flops = computed * prediction.flops_per_step
    return flops / (peak * high) + updated, flops / (peak * low) + updated


def _communicating(job: Job, prediction: Prediction, gpu: Gpu, computing: Range) -> Range:
    """Seconds that the computation waits for collectives: ring algorithms, over the slowest link between the ranks."""
    ranks, moved = job.world_size, prediction.communication_bytes_per_step
    one_node = ranks <= job.gpus_per_node
    bandwidth = 1e9 * (gpu.link_gb_s if one_node else min(gpu.network_gb_s, gpu.link_gb_s))
    around = {
        name: (2 if name.startswith("all_reduce") else 1) * (ranks - 1) / ranks * size for name, size in moved.items()
    }
    if not one_node and "all_gather" in around and job.zero.hpz_partition_size > 1:  # backward's stay within a node
        around["all_gather"] *= 1 / 2 + 1 / 2 * bandwidth / (1e9 * gpu.link_gb_s)
    beside = sum(size for name, size in around.items() if overlaps(job, name))
    bare, behind = sum(around.values()) - beside, window(job)
    ends = zip(computing, reversed(LINK_SHARE), reversed(HIDDEN), strict=True)
    low, high = (
        bare / bandwidth / share + max(0.0, beside / bandwidth / share - behind * hidden * seconds)
        for seconds, share, hidden in ends
    )
    return min(low, high), high


def window(job: Job) -> float:
    """Share of a step's computation that collectives may go on behind.

    Stage 3 and FSDP2: all of it; gathers of forward and of backward with the reduction are as 1 to 2, and so are the
    two computations. Others reduce behind backward alone.
    """
    if job.zero_stage == 3 or job.is_fsdp:
        return 1
    backward = 3 / 4 if job.recomputes else 2 / 3  # of forward, backward and recomputation
    return backward / (1 if job.zero_stage == 2 else job.settings.gradient_accumulation_steps)


def overlaps(job: Job, collective: str) -> bool:
    """Whether `collective` ("all_reduce", "all_gather"...) goes on beside the computation."""
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
    for each forward and backward, and writes them once. Nothing is taken to overlap.
    """
    here, passes = job.ranks_per_node, prediction.gradient_accumulation_steps
    ranks, crossing, updated, swapped = job.world_size, 0.0, 0.0, 0.0
    if job.zero.offload_optimizer:
        share = prediction.trainable_parameters / ranks
        crossing += 2 * share * (passes + 1)  # gradients down in each pass, weights up once
        updated = share * here
    if job.zero.offload_param:
        crossing += 2 * 2 * passes * prediction.parameters / ranks  # up for forward and for backward
    if job.zero.offload_optimizer == "nvme":
        swapped += 2 * 16 * prediction.trainable_parameters / ranks * here
    if job.zero.offload_param == "nvme":
        swapped += 2 * (2 * passes + 1) * prediction.parameters / ranks * here
    low, high = (crossing / (gpu.host_gb_s * 1e9 * share) for share in reversed(HOST_SHARE))
    return low + updated / CPU_ADAM[1] + swapped / NVME[1], high + updated / CPU_ADAM[0] + swapped / NVME[0]


# money


@dataclass(frozen=True)
class Cost:
    """Money in the currency of the price, (low, high). `run` and `hours` are None where the steps are not known."""

    per_step: Range
    per_million_tokens: Range
    hours: Range | None
    run: Range | None


def cost(job: Job, speed: Speed, price: float, rows: RowLengths | None = None) -> Cost:
    """`price`: of one GPU for one hour. The run's steps are known from max_steps, or epochs of data at hand; of packed
    rows from `rows`."""
    per_step = _times(speed.step_seconds, price * job.world_size / 3600)
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


def _times(values: Range, factor: float) -> Range:
    return values[0] * factor, values[1] * factor


# a measured run


def read_measured(path: Path) -> dict[str, Any]:
    """A metrics.json for `--calibrate`. Raises Refusal where it is none of a finished run on a GPU."""
    try:
        measured = json.loads(path.read_text())
        if measured["device"] == "cpu":
            raise ValueError("It was measured on CPU processes.")
        needed = {key: measured[key] for key in ("world_size", "micro_batch_size", "gradient_accumulation_steps")}
        needed["step_seconds.median"] = (measured["step_seconds"] or {}).get("median")
        needed["tokens_per_second.all"] = (measured["tokens_per_second"] or {}).get("all")
        needed |= {} if measured["max_length"] is None else {"max_length": measured["max_length"]}
        for name, value in needed.items():
            if not value or not value > 0:
                raise ValueError(f"{name} is {value}.")
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise refusal("ZR812", path=path, error=error if isinstance(error, ValueError) else repr(error)) from error
    return measured


def calibrated(measured: Mapping[str, Any], request: PlanRequest, predict: Predict) -> float:
    """Measured over estimated seconds of a run of this recipe. Raises Refusal where it is a run of something else.

    The estimate is of sequences as long as the measured ones were, padding included; where the file does not say how
    many tokens its steps had, as long as they may be.
    """
    name, strategies, ranks = measured["strategy"], request.strategies, measured["world_size"]
    model = request.recipe.settings.model_name_or_path
    if measured["model"] != model or name not in ("single", *strategies):
        planned = ", ".join(strategies)
        raise refusal("ZR814", measured=measured["model"], strategy=name, model=model, strategies=planned)
    job = job_of(request.recipe, request.config, name, strategies.get(name), ranks).changed(
        per_device_train_batch_size=measured["micro_batch_size"],
        gradient_accumulation_steps=measured["gradient_accumulation_steps"],
        max_length=measured["max_length"],
    )
    prediction = predict(job)
    tokens, steps = (measured.get("tokens") or {}).get("all"), len(measured.get("loss_history") or [])
    rows = None
    if tokens and steps:
        sequences = estimate(job, prediction, request.gpu).tokens_per_step / prediction.max_length
        rows = RowLengths((tokens / steps / sequences,), 1, None, "measured")
    estimated = estimate(job, prediction, request.gpu, rows=rows)
    return estimated.tokens_per_step / measured["tokens_per_second"]["all"] / estimated.middle
