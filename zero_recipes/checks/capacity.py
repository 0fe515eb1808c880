"""Room for a run: memory of the host, disk for checkpoints and swap files. Lower bounds. It imports no torch itself."""

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

DEFAULT_BUFFER = 10**8  # elements: deepspeed/runtime/zero/offload_config.py


def room_findings(run: Run, config, here: int, host: Host) -> list[Finding]:
    """What depends on the number of parameters, and on a checkpoint's size. `config`: the model's, None where it is not
    at hand; `here`: processes on this machine."""
    from zero_recipes.model import built_or_none

    model = config and built_or_none(config, run.settings.trust_remote_code)
    if model is None:
        return []
    sizes = [p.numel() for p in model.parameters()]
    return [
        *memory_findings(run, config, sum(sizes), here, host),
        *nvme_findings(run, sizes, here, host),
        *disk_findings(run, config, sum(sizes), here, host),
    ]


def memory_findings(run: Run, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More host memory than there is: the kernel would kill a process, with exit code -9 and no message."""
    terms = host_terms(run.strategy, run.device, run.settings, config, psi, here)
    limit, source = host.memory()
    if sum(terms.values()) > limit:
        needed, free = units.size(sum(terms.values())), units.size(limit)
        yield finding("ZR608", needed=needed, free=free, terms=_sum(terms), psi=psi, here=here, source=source)


def disk_findings(run: Run, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More to save than the disk takes: the run would end at its first checkpoint or, trained, at its last line."""
    from zero_recipes.checkpoint.output_dir import previous_of, saved_in

    terms = disk_terms(run.strategy, run.settings, config, psi, here)
    free = host.free_disk(run.output_dir)
    # what goes before: under overwrite the run before the last one, else checkpoints, one by one by save_total_limit
    leaving = [previous_of(run.output_dir)] if run.settings.overwrite else saved_in(run.output_dir)
    files = [path for place in leaving for path in (place, *place.rglob("*")) if path.is_file()]
    going = sum(path.stat().st_size for path in files)
    if sum(terms.values()) > free + going:
        needed = units.size(sum(terms.values()))
        yield finding("ZR609", folder=run.output_dir, needed=needed, free=units.size(free), terms=_sum(terms))


def nvme_findings(run: Run, sizes: Sequence[int], here: int, host: Host) -> Iterator[Finding]:
    """Room on the disk, and buffers that fit. `sizes`: elements of each tensor of the model."""
    strategy = run.strategy
    config, world = strategy.ds_config, strategy.world_size
    if config is None or not config.on_nvme or config.stage != 3:
        return
    each = 4 if run.settings.precision == "fp32" else 2
    parts = [-(-size // world) for size in sizes]
    swapped = [part for part in parts if part * each >= config.least_swapped]
    if config.offload_param == "nvme":
        block = config.offload_block("offload_param")
        buffer = number_in(block, "buffer_size", DEFAULT_BUFFER)
        if swapped and buffer < max(swapped):
            yield finding("ZR620", buffer=buffer, largest=max(swapped))
    trained = 0 if run.settings.use_peft else sum(parts) / 2  # of the Trainer's two groups one has half or more
    locked, limit = sum(swap_buffers(config, trained).values()), host.lockable()
    if locked > limit:
        yield finding("ZR655", needed=units.size(int(locked)), limit=units.size(int(limit)))
    swaps = each * (config.offload_param == "nvme") + 16 * (config.offload_optimizer == "nvme")
    needed = here * sum(swapped) * swaps
    path = config.offload_block(config.on_nvme[0]).get("nvme_path")
    free = host.free_disk(path) if path and Path(path).is_dir() else None
    if free is not None and needed > free:
        yield finding("ZR619", needed=units.size(needed), path=path, free=units.size(free), here=here)


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{units.size(size)} ({what})" for what, size in terms.items() if size)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def load_bytes_per_parameter(settings: Settings, config) -> int:
    """Of the dtype that the weights are loaded in; 0 where they are quantized on the way."""
    requested = (settings.model_init_kwargs or {}).get("dtype") or settings.dtype
    requested = config.dtype or "float32" if requested in ("auto", None) else requested
    return 0 if settings.load_in_4bit or settings.load_in_8bit else _bytes_of(requested)


def _bytes_of(dtype: object) -> int:
    return DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 0)


def host_terms(strategy: Strategy, device: str, settings: Settings, config, psi: int, here: int) -> dict:
    """{what: bytes} that the `here` processes of this machine hold in its memory at one moment, at least. On CPUs all
    model states but those on NVMe; on GPUs what the ds_config offloads to the CPU and, below stage 3, the loaded
    weights of every process. Weights whose file has the requested dtype do not count: safetensors maps the file."""
    states = _states(strategy, settings, config, psi)
    optimizer, params = strategy.ds.offload_optimizer, strategy.ds.offload_param
    if device == "cpu":
        terms = {} if optimizer == "nvme" else {"optimizer": states.optimizer}
        terms |= {"gradients": states.grads} | ({} if params == "nvme" else {"parameters": states.params})
    else:
        terms = {"offloaded optimizer": states.optimizer} if optimizer == "cpu" else {}
        terms |= {"offloaded parameters": states.params} if params == "cpu" else {}
        each = load_bytes_per_parameter(settings, config)
        mapped = not settings.random_weights and each == _bytes_of(config.dtype)
        if strategy.zero_stage != 3 and not mapped:
            loaded = {"weights while loading": each * psi}
            terms = max(terms, loaded, key=lambda found: sum(found.values()))  # not at the same moment
    return {what: int(here * size) for what, size in terms.items()}


def beside_offloaded_optimizer(config: DsConfig, share: float, width: int, accumulates: bool) -> float:
    """Bytes of one process's host memory that DeepSpeed 0.19.8 holds beside the optimizer's states on the CPU or on
    NVMe; 0 where they are on the device that trains.

    On NVMe the gradients of its part in 16 bits stay in memory (zero/stage3.py `grad_partitions_flat_buffer`). On the
    CPU: an fp32 gradient for each of its `share` of the parameters. Below stage 3 the weights once more as they go back
    to the GPU (zero/stage_1_and_2.py `param_buffer_of_bit16_for_cpu_offload_groups`) and, where micro steps are
    accumulated, their gradients; at stage 3 the gradients always (zero/stage3.py `grad_partitions_flat_buffer`). Plus
    what torch's rounding of page-locked memory adds (core/host.py). `width`: bytes of an element on the GPU.
    """
    pinned_block = config.offload_block("offload_optimizer").get("pin_memory", True)
    if config.offload_optimizer == "nvme" and config.stage == 3:
        return pinned_bytes(int(width * share), os.environ) if pinned_block else width * share
    if config.offload_optimizer != "cpu":
        return 0
    copies = 1 if config.stage == 3 or not accumulates else 2
    buffers = 4 * share + copies * width * share
    if not pinned_block:
        return buffers
    pinned = [width * share] if config.stage == 3 else [4 * share, 4 * share, width * share]  # the first: the weights
    return buffers + sum(pinned_bytes(int(size), os.environ) - int(size) for size in pinned)


def swap_buffers(config: DsConfig, group: float, ranks: int = 0) -> dict[str, float]:
    """{what: bytes} of one process's buffers for NVMe (DeepSpeed 0.19.8, runtime/swap_tensor/).

    partitioned_param_swapper.py: buffer_count of buffer_size elements, 16 bits at least, and room for all parameters of
    the largest sub-group, the other processes' parts too (zero/stage3.py gives `reserve_partitioned_swap_space` their
    ds_numel; `ranks`: so many processes, 0 leaves it out). optimizer_utils.py: buffer_count of the largest sub-group in
    fp32. `group`: elements of one process's part of the largest parameter group.
    """
    terms = {}
    largest = min(number_in(config.zero, "sub_group_size", 10**9), group)
    if config.offload_param == "nvme":
        block = config.offload_block("offload_param")
        size = number_in(block, "buffer_size", DEFAULT_BUFFER)
        terms["swap buffers of parameters"] = 2 * (number_in(block, "buffer_count", 5) * size + ranks * largest)
    if config.offload_optimizer == "nvme":
        block = config.offload_block("offload_optimizer")
        terms["swap buffers of the optimizer"] = 4 * number_in(block, "buffer_count", 4) * largest
    return terms


class SwapTensor(NamedTuple):
    """One tensor of a model, as far as swapping depends on it. `size`: elements."""

    size: int
    is_matrix: bool
    trained: bool


def swapped_bytes(config: DsConfig, tensors: Iterable[SwapTensor], ranks: int, width: int = 2) -> int:
    """Bytes of one process's swap files on NVMe under DeepSpeed 0.19.8, with `width` bytes a parameter.

    Of the optimizer the fp32 master, momentum and variance, a group at a time (the Trainer's two: vectors have no
    weight decay), and the fp32 gradients that its step reads (swap_tensor/optimizer_utils.py `_swap_out_gradients`).
    What is smaller than MIN_AIO_BYTES, 1 MiB, or than aio.block_size stays in memory.
    """
    least, parts = config.least_swapped, [tensor._replace(size=-(-tensor.size // ranks)) for tensor in tensors]
    total = 0
    if config.offload_param == "nvme" and config.stage == 3:
        total += sum(width * part.size for part in parts if width * part.size >= least)
    if config.offload_optimizer == "nvme" and config.stage == 3:
        trained = [part for part in parts if part.trained]
        groups = [sum(part.size for part in trained if part.is_matrix is matrix) for matrix in (True, False)]
        total += sum(12 * size for size in groups if 4 * size >= least)
        total += sum(4 * part.size for part in trained if 4 * part.size >= least)
    return total


def read_at_resume(weights: float, optimizer: float, zero_stage: int | None, world_size: int) -> int:
    """Bytes that each process reads into the host's memory at once to go on from a checkpoint.

    DeepSpeed 0.19.8, runtime/engine.py `load_checkpoint`: first, below stage 3, mp_rank_00_model_states.pt with all the
    weights (at stage 0 the optimizer's states too), then its own part of the optimizer's states with the fp32 weights.
    Both by torch.load(map_location="cpu"), so they are added to what training keeps there (deepspeedai/DeepSpeed#3938).
    Without DeepSpeed the weights are mapped and the optimizer's states go to the device tensor by tensor.
    """
    if zero_stage is None:
        return 0
    if zero_stage == 0:
        return int(weights + optimizer)
    return int(max(weights if zero_stage < 3 else 0, optimizer / world_size))


def _states(strategy: Strategy, settings: Settings, config, psi: int) -> ModelState:
    """Gradients and optimizer only of Adam. Outside of DeepSpeed's 16 bits everything has the weights' dtype."""
    named = strategy.ds_config is not None and strategy.ds_config.optimizer is not None
    adam = not named and str(settings.optim).startswith("adamw_torch")
    trainable = psi if adam and not settings.use_peft else 0
    if _in_16_bits(strategy, settings):
        packed = 4 if settings.load_in_4bit else 2 if settings.load_in_8bit else 1
        each = ModelState(2 / packed, 2, strategy.ds_config.adam_bytes)
    else:
        width = load_bytes_per_parameter(settings, config)
        each = ModelState(width, width, 2 * width)
    return model_state_bytes(psi, strategy.world_size, strategy.zero_stage or 0, trainable, each)


def _in_16_bits(strategy: Strategy, settings: Settings) -> bool:
    return strategy.is_deepspeed and settings.precision != "fp32"


def saved_weights(strategy: Strategy, settings: Settings, config, psi: int) -> int:
    """Bytes of model.safetensors: 16-bit where DeepSpeed trains in 16 bits, else the dtype of loading."""
    if settings.use_peft:
        return 0  # an adapter: small, and its size is not known here
    return (2 if _in_16_bits(strategy, settings) else load_bytes_per_parameter(settings, config)) * psi


def checkpoint_bytes(strategy: Strategy, settings: Settings, config, psi: int, here: int) -> int:
    """Bytes of one checkpoint that the Trainer writes from the `here` processes of this machine, at least. Weights,
    Adam's states and, under DeepSpeed below stage 3, the weights once more in mp_rank_00_model_states.pt."""
    weights = saved_weights(strategy, settings, config, psi)
    if settings.save_only_model or settings.use_peft:
        return weights
    writers = here if (strategy.zero_stage or 0) >= 1 else 1
    optimizer = _states(strategy, settings, config, psi).optimizer * writers
    return resumable_bytes(weights, optimizer, strategy.zero_stage)


def resumable_bytes(weights: float, optimizer: float, zero_stage: int | None) -> int:
    """Bytes on disk of a checkpoint to go on from: `weights` as they are saved, and the `optimizer`'s states. Under
    DeepSpeed below stage 3 the weights once more, in mp_rank_00_model_states.pt (without LoRA's frozen ones:
    transformers/trainer.py passes exclude_frozen_parameters). `zero_stage`: None without DeepSpeed."""
    return int(weights + optimizer + (weights if zero_stage in (0, 1, 2) else 0))


def disk_terms(strategy: Strategy, settings: Settings, config, psi: int, here: int) -> dict[str, int]:
    """{what: bytes} that output_dir must take: checkpoints side by side, then the model at the end.
    transformers/trainer_utils.py `rotate_checkpoints` deletes the oldest after the newest is written, so that one more
    than save_total_limit is there. Without a limit the number is taken from max_steps and save_steps if known."""
    terms = {}
    if settings.saves_checkpoints:
        one = checkpoint_bytes(strategy, settings, config, psi, here)
        steps, every, limit = settings.max_steps, settings.save_steps, settings.save_total_limit
        by_steps = getattr(settings.save_strategy, "value", settings.save_strategy) == "steps"
        written = int(-(-steps // every)) if by_steps and steps > 0 and every >= 1 else 1
        count = max(1, min(written, limit + 1) if limit and limit > 0 else written)  # side by side, at least
        terms[f"{count} checkpoint{'s' if count > 1 else ''} of {units.size(one)}"] = count * one
    if settings.save_model:
        terms["the model"] = saved_weights(strategy, settings, config, psi)
    return terms
