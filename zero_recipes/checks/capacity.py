"""Room for a run, as lower bounds: memory of the host, disk for checkpoints and swap files. No import of torch.

File names are those of DeepSpeed 0.19.8, under deepspeed/runtime/.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zero_recipes.config.ds_config import OF_CPU_ADAM, DsConfig, number_in
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings, loaded_dtype
from zero_recipes.core import units
from zero_recipes.core.allocator import pinned_bytes
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host import Host
from zero_recipes.core.zero_paper import ModelState, model_state_bytes

LITTLE = 0.2  # of the layers' weights: 4 bits are not worth it where they pack less
DEFAULT_BUFFER = 10**8  # elements: zero/offload_config.py


def room_findings(run: Run, here: int, host: Host) -> list[Finding]:
    """Too little memory or disk; empty where the model is not at hand. `here`: processes on this machine."""
    from zero_recipes.checks.rules import bare_model

    model = bare_model(run)
    if model is None:
        return []
    sizes = [p.numel() for p in model.parameters()]
    psi = sum(sizes)
    return [
        *memory_findings(run, psi, here, host),
        *nvme_findings(run, sizes, here, host),
        *disk_findings(run, psi, here, host),
    ]


def memory_findings(run: Run, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """Too little host memory: the kernel would kill a process, with exit code -9 and no message."""
    terms = _host_terms(run, psi, here)
    needed = sum(terms.values())
    limit, source = host.memory()
    if needed > limit:
        about = {"needed": units.size(needed), "free": units.size(limit), "terms": _sum(terms)}
        yield finding("ZR608", **about, psi=psi, here=here, source=source)


def disk_findings(run: Run, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """Too little disk: the run would end at its first checkpoint or, trained, at its last line."""
    terms = _disk_terms(run, psi, here)
    needed = sum(terms.values())
    free = host.free_disk(run.output_dir)
    if needed > free + _bytes_that_go(run):
        about = {"needed": units.size(needed), "free": units.size(free), "terms": _sum(terms)}
        yield finding("ZR609", **about, folder=run.output_dir)


def _bytes_that_go(run: Run) -> int:
    """Bytes that go before the room is needed: under overwrite the run before the last one, else checkpoints."""
    from zero_recipes.checkpoint.output_dir import previous_of, saved_in

    places = saved_in(run.output_dir)
    if run.settings.overwrite:
        places = [previous_of(run.output_dir)]
    paths = [path for place in places for path in (place, *place.rglob("*"))]
    return sum(path.stat().st_size for path in paths if path.is_file())


def nvme_findings(run: Run, sizes: Sequence[int], here: int, host: Host) -> Iterator[Finding]:
    """Too little room on NVMe, or in the buffers for it. `sizes`: elements of each tensor of the model."""
    config = run.ds
    if not config.on_nvme or config.stage != 3:
        return
    params = config.offload_param == "nvme"
    optimizer = config.offload_optimizer == "nvme"
    width = 4 if run.settings.precision == "fp32" else 2
    parts = [-(-size // run.world_size) for size in sizes]
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


def _loaded_width(run: Run) -> int:
    """Bytes of a parameter as it is loaded; 0 where weights are quantized on the way."""
    if run.settings.load_in_4bit or run.settings.load_in_8bit:
        return 0
    return _bytes_of(loaded_dtype(run.settings, run.config.dtype))


def _host_terms(run: Run, psi: int, here: int) -> dict[str, int]:
    """{what: bytes} that this machine's processes hold at one moment, at least."""
    ds = run.ds
    states = _states(run, psi)
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
        width = _loaded_width(run)
        is_mapped = not run.settings.random_weights and width == _bytes_of(run.config.dtype)
        loaded = 0 if is_mapped or run.stage == 3 else width * psi  # by every process
        if loaded > sum(terms.values()):  # not at the same moment
            terms = {"weights while loading": loaded}
    return {what: int(here * size) for what, size in terms.items()}


def beside_offloaded_optimizer(config: DsConfig, share: float, width: int, accumulates: bool) -> float:
    """Bytes of one process's host memory beside the offloaded states of its `share` of the parameters.

    Stage 3: gradients in the GPU's dtype (zero/stage3.py `grad_partitions_flat_buffer`), on the CPU also in fp32.
    Below: gradients in fp32, the weights as they go back to the GPU (zero/stage_1_and_2.py
    `param_buffer_of_bit16_for_cpu_offload_groups`) and, where micro steps are accumulated, their gradients.
    `width`: bytes of an element on the GPU.
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
    of the largest sub-group, other processes' parts too (zero/stage3.py `reserve_partitioned_swap_space`; `ranks`: so
    many processes, 0 leaves it out). optimizer_utils.py: buffer_count of the largest sub-group in fp32.
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
    """One tensor of a model, as far as its swap files depend on it."""

    size: int  # elements
    is_matrix: bool
    trained: bool


def swapped_bytes(config: DsConfig, tensors: Iterable[SwapTensor], ranks: int, width: int = 2) -> int:
    """Bytes of one process's swap files on NVMe, with `width` bytes a parameter.

    Of the optimizer the fp32 master, momentum and variance, a group at a time, and the fp32 gradients that its step
    reads (swap_tensor/optimizer_utils.py `_swap_out_gradients`).
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
    optimizer's states too), then the process's part of the states with the fp32 weights. It comes on top of what
    training keeps there (deepspeedai/DeepSpeed#3938).
    """
    if zero_stage is None:
        return 0
    if zero_stage == 0:
        return int(weights + optimizer)
    part = optimizer / world_size
    return int(part if zero_stage == 3 else max(weights, part))


def _states(run: Run, psi: int) -> ModelState:
    """Bytes of one process's model states: gradients and optimizer where it is Adam.

    Outside of DeepSpeed's 16 bits everything has the weights' dtype.
    """
    settings = run.settings
    is_adam = run.ds.optimizer is None and settings.optimizer_name in OF_CPU_ADAM
    trainable = psi if is_adam and not settings.use_peft else 0
    if _in_16_bits(run):
        weight = 2.0
        if settings.load_in_8bit:
            weight = 1.0
        if settings.load_in_4bit:
            weight = 0.5
        each = ModelState(weight, 2, run.ds.adam_bytes)
    else:
        width = _loaded_width(run)
        each = ModelState(width, width, 2 * width)
    return model_state_bytes(psi, run.world_size, run.stage or 0, trainable, each)


def _in_16_bits(run: Run) -> bool:
    return run.strategy.is_deepspeed and run.settings.precision != "fp32"


def _saved_weights(run: Run, psi: int) -> int:
    """Bytes of model.safetensors: 16-bit where DeepSpeed trains in 16 bits, else the dtype of loading."""
    if run.settings.use_peft:
        return 0  # an adapter: small, and its size is not known here
    width = 2 if _in_16_bits(run) else _loaded_width(run)
    return width * psi


def checkpoint_bytes(run: Run, psi: int, here: int) -> int:
    """Bytes of one checkpoint that the Trainer writes from this machine, at least."""
    weights = _saved_weights(run, psi)
    if run.settings.save_only_model or run.settings.use_peft:
        return weights
    optimizer = _states(run, psi).optimizer
    if run.stage:
        optimizer *= here
    return resumable_bytes(weights, optimizer, run.stage)


def resumable_bytes(weights: float, optimizer: float, zero_stage: int | None) -> int:
    """Bytes on disk of a checkpoint to go on from, with `weights` as they are saved.

    Below stage 3 they are once more in mp_rank_00_model_states.pt (without LoRA's frozen ones: transformers/trainer.py
    passes exclude_frozen_parameters).
    """
    total = weights + optimizer
    if zero_stage in (0, 1, 2):
        total += weights
    return int(total)


def _disk_terms(run: Run, psi: int, here: int) -> dict[str, int]:
    """{what: bytes} that output_dir must take."""
    terms = {}
    if run.settings.saves_checkpoints:
        size = checkpoint_bytes(run, psi, here)
        count = _checkpoints_kept(run.settings)
        plural = "s" if count > 1 else ""
        terms[f"{count} checkpoint{plural} of {units.size(size)}"] = count * size
    if run.settings.save_model:
        terms["the model"] = _saved_weights(run, psi)
    return terms


def _checkpoints_kept(settings: Settings) -> int:
    """How many checkpoints are on disk at once, at least. The oldest is deleted after the newest is written."""
    steps = settings.max_steps
    interval = settings.save_steps
    written = 1
    by_steps = getattr(settings.save_strategy, "value", settings.save_strategy) == "steps"
    if by_steps and steps > 0 and interval >= 1:
        written = int(-(-steps // interval))
    limit = settings.save_total_limit or 0
    if limit > 0:
        written = min(written, limit + 1)
    return written
