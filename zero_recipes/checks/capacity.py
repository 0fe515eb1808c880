"""Room for a run: memory of the host, disk for checkpoints and swap files. Lower bounds. It imports no torch itself.

File names are those of DeepSpeed 0.19.8, under deepspeed/runtime/.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zero_recipes.config.ds_config import DsConfig, number_in
from zero_recipes.config.recipe import Settings
from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy
from zero_recipes.core import units
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host import Host, pinned_bytes
from zero_recipes.core.zero_paper import ModelState, model_state_bytes

DEFAULT_BUFFER = 10**8  # elements: zero/offload_config.py


def room_findings(run: Run, config, here: int, host: Host) -> list[Finding]:
    """`config`: the model's, or None; `here`: processes on this machine."""
    from zero_recipes.model import built_or_none

    model = config and built_or_none(config, run.settings.trust_remote_code)
    if model is None:
        return []
    sizes = [p.numel() for p in model.parameters()]
    psi = sum(sizes)
    return [
        *memory_findings(run, config, psi, here, host),
        *nvme_findings(run, sizes, here, host),
        *disk_findings(run, config, psi, here, host),
    ]


def memory_findings(run: Run, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More host memory than there is: the kernel would kill a process, with exit code -9 and no message."""
    terms = _host_terms(run, config, psi, here)
    needed = sum(terms.values())
    limit, source = host.memory()
    if needed > limit:
        about = {"needed": units.size(needed), "free": units.size(limit), "terms": _sum(terms)}
        yield finding("ZR608", **about, psi=psi, here=here, source=source)


def disk_findings(run: Run, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More to save than the disk takes: the run would end at its first checkpoint or, trained, at its last line."""
    terms = _disk_terms(run, config, psi, here)
    needed = sum(terms.values())
    free = host.free_disk(run.output_dir)
    if needed > free + _bytes_that_go(run):
        about = {"needed": units.size(needed), "free": units.size(free), "terms": _sum(terms)}
        yield finding("ZR609", **about, folder=run.output_dir)


def _bytes_that_go(run: Run) -> int:
    """Under overwrite the run before the last one, else checkpoints, one by one by save_total_limit."""
    from zero_recipes.checkpoint.output_dir import previous_of, saved_in

    places = saved_in(run.output_dir)
    if run.settings.overwrite:
        places = [previous_of(run.output_dir)]
    paths = [path for place in places for path in (place, *place.rglob("*"))]
    return sum(path.stat().st_size for path in paths if path.is_file())


def nvme_findings(run: Run, sizes: Sequence[int], here: int, host: Host) -> Iterator[Finding]:
    """Room on the disk, and buffers that fit. `sizes`: elements of each tensor of the model."""
    config = run.strategy.ds
    if not config.on_nvme or config.stage != 3:
        return
    params = config.offload_param == "nvme"
    optimizer = config.offload_optimizer == "nvme"
    width = 4 if run.settings.precision == "fp32" else 2
    parts = [-(-size // run.strategy.world_size) for size in sizes]
    swapped = [part for part in parts if part * width >= config.least_swapped]
    largest = max(swapped, default=0)
    buffer = number_in(config.offload_block("offload_param"), "buffer_size", DEFAULT_BUFFER)
    if params and buffer < largest:
        yield finding("ZR620", buffer=buffer, largest=largest)
    trained = 0 if run.settings.use_peft else sum(parts) / 2  # of the Trainer's two groups one has half or more
    locked = sum(swap_buffers(config, trained).values())
    limit = host.lockable()
    if locked > limit:
        yield finding("ZR655", needed=units.size(int(locked)), limit=units.size(int(limit)))
    path = config.offload_block(config.on_nvme[0]).get("nvme_path")
    if not path or not Path(path).is_dir():
        return
    needed = here * sum(swapped) * (width * params + 16 * optimizer)
    free = host.free_disk(path)
    if needed > free:
        yield finding("ZR619", needed=units.size(needed), path=path, free=units.size(free), here=here)


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{units.size(size)} ({what})" for what, size in terms.items() if size)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def _bytes_of(dtype: object) -> int:
    return DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 0)


def _loaded_width(settings: Settings, config) -> int:
    """Bytes of a parameter as it is loaded; 0 where weights are quantized on the way."""
    if settings.load_in_4bit or settings.load_in_8bit:
        return 0
    requested = (settings.model_init_kwargs or {}).get("dtype") or settings.dtype
    if requested in ("auto", None):
        requested = config.dtype or "float32"
    return _bytes_of(requested)


def _host_terms(run: Run, config, psi: int, here: int) -> dict[str, int]:
    """{what: bytes} that this machine's processes hold in its memory at one moment, at least."""
    ds = run.strategy.ds
    states = _states(run.strategy, run.settings, config, psi)
    terms = {}
    if run.device == "cpu":
        if ds.offload_optimizer != "nvme":
            terms["optimizer"] = states.optimizer
        terms["gradients"] = states.grads
        if ds.offload_param != "nvme":
            terms["parameters"] = states.params
    else:
        if ds.offload_optimizer == "cpu":
            terms["offloaded optimizer"] = states.optimizer
        if ds.offload_param == "cpu":
            terms["offloaded parameters"] = states.params
        loaded = _loading(run, config, psi)
        if loaded > sum(terms.values()):  # not at the same moment
            terms = {"weights while loading": loaded}
    return {what: int(here * size) for what, size in terms.items()}


def _loading(run: Run, config, psi: int) -> int:
    """Bytes of the weights that every process loads below stage 3; a file of the requested dtype is only mapped."""
    width = _loaded_width(run.settings, config)
    is_mapped = not run.settings.random_weights and width == _bytes_of(config.dtype)
    return 0 if is_mapped or run.strategy.zero_stage == 3 else width * psi


def beside_offloaded_optimizer(config: DsConfig, share: float, width: int, accumulates: bool) -> float:
    """Bytes of one process's host memory beside the offloaded states of its `share` of the parameters.

    Stage 3: gradients in the GPU's dtype (zero/stage3.py `grad_partitions_flat_buffer`), on the CPU also in fp32.
    Below: gradients in fp32, the weights as they go back to the GPU (zero/stage_1_and_2.py
    `param_buffer_of_bit16_for_cpu_offload_groups`) and, where micro steps are accumulated, their gradients.
    Page-locked memory is rounded (core/host.py). `width`: bytes of an element on the GPU.
    """
    is_pinned = config.offload_block("offload_optimizer").get("pin_memory", True)
    if config.offload_optimizer == "nvme" and config.stage == 3:
        return pinned_bytes(int(width * share), os.environ) if is_pinned else width * share
    if config.offload_optimizer != "cpu":
        return 0
    copies = 2 if accumulates and config.stage != 3 else 1
    buffers = 4 * share + copies * width * share
    if not is_pinned:
        return buffers
    pinned = [int(width * share)]
    if config.stage != 3:
        pinned += [int(4 * share)] * 2  # the weights, and the gradients
    return buffers + sum(pinned_bytes(size, os.environ) - size for size in pinned)


def swap_buffers(config: DsConfig, group: float, ranks: int = 0) -> dict[str, float]:
    """{what: bytes} of one process's buffers for NVMe (swap_tensor/). `group`: its elements of the largest group.

    partitioned_param_swapper.py: buffer_count of buffer_size elements, 16 bits at least, and room for all parameters
    of the largest sub-group, the other processes' parts too (zero/stage3.py gives `reserve_partitioned_swap_space`
    their ds_numel; `ranks`: so many processes, 0 leaves it out).
    optimizer_utils.py: buffer_count of the largest sub-group in fp32.
    """
    terms = {}
    largest = min(number_in(config.zero, "sub_group_size", 10**9), group)
    if config.offload_param == "nvme":
        block = config.offload_block("offload_param")
        size = number_in(block, "buffer_size", DEFAULT_BUFFER)
        count = number_in(block, "buffer_count", 5)
        terms["swap buffers of parameters"] = 2 * (count * size + ranks * largest)
    if config.offload_optimizer == "nvme":
        count = number_in(config.offload_block("offload_optimizer"), "buffer_count", 4)
        terms["swap buffers of the optimizer"] = 4 * count * largest
    return terms


class SwapTensor(NamedTuple):
    """One tensor of a model, as far as swapping depends on it."""

    size: int  # elements
    is_matrix: bool
    trained: bool


def swapped_bytes(config: DsConfig, tensors: Iterable[SwapTensor], ranks: int, width: int = 2) -> int:
    """Bytes of one process's swap files on NVMe, with `width` bytes a parameter.

    Of the optimizer the fp32 master, momentum and variance, a group at a time, and the fp32 gradients that its step
    reads (swap_tensor/optimizer_utils.py `_swap_out_gradients`). What is small stays in memory.
    """
    if config.stage != 3:
        return 0
    least = config.least_swapped
    total = 0
    groups = {True: 0, False: 0}  # elements of the Trainer's two: vectors have no weight decay
    for tensor in tensors:
        part = -(-tensor.size // ranks)
        if config.offload_param == "nvme" and width * part >= least:
            total += width * part
        if config.offload_optimizer == "nvme" and tensor.trained:
            groups[tensor.is_matrix] += part
            if 4 * part >= least:
                total += 4 * part
    for size in groups.values():
        if 4 * size >= least:
            total += 12 * size
    return total


def read_at_resume(weights: float, optimizer: float, zero_stage: int | None, world_size: int) -> int:
    """Bytes that each process reads into host memory at once to go on from a checkpoint: the larger of two files.

    engine.py `load_checkpoint`: below stage 3 mp_rank_00_model_states.pt with all weights (at stage 0 the
    optimizer's states too), then the process's part of the states with the fp32 weights. Both come on top of what
    training keeps there (deepspeedai/DeepSpeed#3938). Without DeepSpeed nothing is read whole.
    """
    if zero_stage is None:
        return 0
    if zero_stage == 0:
        return int(weights + optimizer)
    part = optimizer / world_size
    return int(part if zero_stage == 3 else max(weights, part))


def _states(strategy: Strategy, settings: Settings, config, psi: int) -> ModelState:
    """Gradients and optimizer only of Adam. Outside of DeepSpeed's 16 bits everything has the weights' dtype."""
    is_adam = strategy.ds.optimizer is None and str(settings.optim).startswith("adamw_torch")
    trainable = psi if is_adam and not settings.use_peft else 0
    if _in_16_bits(strategy, settings):
        weight = 2.0
        if settings.load_in_8bit:
            weight = 1.0
        if settings.load_in_4bit:
            weight = 0.5
        each = ModelState(weight, 2, strategy.ds.adam_bytes)
    else:
        width = _loaded_width(settings, config)
        each = ModelState(width, width, 2 * width)
    return model_state_bytes(psi, strategy.world_size, strategy.zero_stage or 0, trainable, each)


def _in_16_bits(strategy: Strategy, settings: Settings) -> bool:
    return strategy.is_deepspeed and settings.precision != "fp32"


def _saved_weights(strategy: Strategy, settings: Settings, config, psi: int) -> int:
    """Bytes of model.safetensors: 16-bit where DeepSpeed trains in 16 bits, else the dtype of loading."""
    if settings.use_peft:
        return 0  # an adapter: small, and its size is not known here
    width = 2 if _in_16_bits(strategy, settings) else _loaded_width(settings, config)
    return width * psi


def checkpoint_bytes(strategy: Strategy, settings: Settings, config, psi: int, here: int) -> int:
    """Bytes of one checkpoint that the Trainer writes from this machine, at least."""
    weights = _saved_weights(strategy, settings, config, psi)
    if settings.save_only_model or settings.use_peft:
        return weights
    optimizer = _states(strategy, settings, config, psi).optimizer
    if strategy.zero_stage:
        optimizer *= here
    return resumable_bytes(weights, optimizer, strategy.zero_stage)


def resumable_bytes(weights: float, optimizer: float, zero_stage: int | None) -> int:
    """Bytes on disk of a checkpoint to go on from, with `weights` as they are saved. `zero_stage`: or None.

    Below stage 3 they are once more in mp_rank_00_model_states.pt (without LoRA's frozen ones: transformers/trainer.py
    passes exclude_frozen_parameters).
    """
    total = weights + optimizer
    if zero_stage in (0, 1, 2):
        total += weights
    return int(total)


def _disk_terms(run: Run, config, psi: int, here: int) -> dict[str, int]:
    """{what: bytes} that output_dir must take."""
    terms = {}
    if run.settings.saves_checkpoints:
        size = checkpoint_bytes(run.strategy, run.settings, config, psi, here)
        count = _checkpoints_kept(run.settings)
        plural = "s" if count > 1 else ""
        terms[f"{count} checkpoint{plural} of {units.size(size)}"] = count * size
    if run.settings.save_model:
        terms["the model"] = _saved_weights(run.strategy, run.settings, config, psi)
    return terms


def _checkpoints_kept(settings: Settings) -> int:
    """At least: one more than save_total_limit, because transformers/trainer_utils.py `rotate_checkpoints` deletes
    the oldest after the newest is written.
    """
    steps = settings.max_steps
    interval = settings.save_steps
    written = 1
    by_steps = getattr(settings.save_strategy, "value", settings.save_strategy) == "steps"
    if by_steps and steps > 0 and interval >= 1:
        written = int(-(-steps // interval))
    limit = settings.save_total_limit or 0
    if limit > 0:
        written = min(written, limit + 1)
    return max(1, written)
