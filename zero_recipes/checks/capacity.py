"""Room for a run: memory of the host, disk for checkpoints, downloads and swap files, shared memory. Lower bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero_recipes.checkpoint.output_dir import previous_of, saved_in
from zero_recipes.checks.cache import missing_of_model
from zero_recipes.checks.lower_bounds import batch_bytes, disk_terms, host_terms, swap_buffers
from zero_recipes.config.ds_config import LEAST_SWAPPED, number_in
from zero_recipes.config.run import RunConfig
from zero_recipes.core import units
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host import Host
from zero_recipes.data.load import on_hub

NCCL_WANTS = 10**9  # bytes of /dev/shm: NVIDIA's documentation starts containers with --shm-size=1g
DEFAULT_MAX_IN_CPU, DEFAULT_BUFFER = 10**9, 10**8  # elements: deepspeed/runtime/zero/offload_config.py


def room_findings(run: RunConfig, here: int, host: Host) -> list[Finding]:
    """What depends on the number of parameters, and on a checkpoint's size. `here`: processes on this machine."""
    from zero_recipes.model import local_config, parameter_sizes

    config = local_config(run.settings)
    sizes = None if config is None else parameter_sizes(config, run.settings.trust_remote_code)
    findings = list(resume_findings(run, here, host))
    if sizes is None:
        return findings
    findings += [*memory_findings(run, config, sum(sizes), here, host), *nvme_findings(run, sizes, here, host)]
    return [*findings, *disk_findings(run, config, sum(sizes), here, host), *download_findings(run, sum(sizes), host)]


def memory_findings(run: RunConfig, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More host memory than there is: the kernel would kill a process, with exit code -9 and no message."""
    terms = host_terms(run.strategy, run.device, run.settings, config, psi, here)
    limit, source = host.memory()
    if sum(terms.values()) > limit:
        needed, free = units.size(sum(terms.values())), units.size(limit)
        yield finding("ZR608", needed=needed, free=free, terms=_sum(terms), psi=psi, here=here, source=source)


def resume_findings(run: RunConfig, here: int, host: Host) -> Iterator[Finding]:
    """A checkpoint that does not fit into the host's memory while it is read: a run that could be trained, not resumed.

    DeepSpeed 0.19.8 (runtime/engine.py, load_checkpoint) reads on every process all of *_model_states.pt, drops it, and
    reads the process's own *_optim_states.pt, both by torch.load(map_location="cpu").
    """
    if run.checkpoint is None or not run.strategy.is_deepspeed:
        return
    sizes = [path.stat().st_size for path in Path(run.checkpoint).glob("global_step*/*_states.pt")]
    needed = here * max(sizes, default=0)
    limit, source = host.memory()
    if needed > limit:
        total, free, each = units.size(needed), units.size(limit), units.size(needed // here)
        where = run.checkpoint
        yield finding("ZR641", checkpoint=where, here=here, source=source, needed=total, free=free, each=each)


def disk_findings(run: RunConfig, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More to save than the disk takes: the run would end at its first checkpoint or, trained, at its last line."""
    terms = disk_terms(run.strategy, run.settings, config, psi, here)
    free = host.free_disk(run.output_dir)
    # what goes before: under overwrite the run before the last one, else checkpoints, one by one by save_total_limit
    leaving = [previous_of(run.output_dir)] if run.settings.overwrite else saved_in(run.output_dir)
    going = sum(path.stat().st_size for folder in leaving for path in _files(folder))
    if sum(terms.values()) > free + going:
        needed = units.size(sum(terms.values()))
        yield finding("ZR609", folder=run.output_dir, needed=needed, free=units.size(free), terms=_sum(terms))


def download_findings(run: RunConfig, psi: int, host: Host) -> Iterator[Finding]:
    """Weights that are still to be downloaded and do not fit; 16 bits each is the least that a hub file has."""
    from huggingface_hub import constants

    settings, cache = run.settings, Path(constants.HF_HUB_CACHE)
    waits = on_hub(settings.model_name_or_path) and not constants.is_offline_mode() and not settings.random_weights
    free = host.free_disk(cache)
    if waits and 2 * psi > free and missing_of_model(settings):
        model, needed = settings.model_name_or_path, units.size(2 * psi)
        yield finding("ZR610", model=model, cache=cache, needed=needed, free=units.size(free))


def shared_memory_findings(run: RunConfig, here: int, host: Host) -> Iterator[Finding]:
    """/dev/shm too small. A warning: NCCL takes none of it between GPUs that reach each other directly."""
    free, settings = host.shared_memory(), run.settings
    ahead = settings.dataloader_num_workers * (settings.dataloader_prefetch_factor or 2)
    needed = max(NCCL_WANTS if run.device == "cuda" and here > 1 else 0, here * ahead * batch_bytes(settings))
    if free is not None and needed > free:
        yield finding("ZR611", free=units.size(free), needed=units.size(needed), here=here)


def nvme_findings(run: RunConfig, sizes: Sequence[int], here: int, host: Host) -> Iterator[Finding]:
    """Room on the disk, buffers that fit, and whether anything swaps. `sizes`: elements of each tensor of the model."""
    strategy = run.strategy
    config, world = strategy.ds_config, strategy.world_size
    if config is None or not config.on_nvme or config.stage != 3:
        return
    each = 4 if run.settings.precision == "fp32" else 2
    least = max(LEAST_SWAPPED, number_in(config.aio, "block_size", 0))
    parts = [-(-size // world) for size in sizes]
    swapped = [part for part in parts if part * each >= least]
    if strategy.offload_param == "nvme":
        block = config.offload_block("offload_param")
        buffer = number_in(block, "buffer_size", DEFAULT_BUFFER)
        kept = number_in(block, "max_in_cpu", DEFAULT_MAX_IN_CPU)
        if swapped and buffer < max(swapped):
            yield finding("ZR620", buffer=buffer, largest=max(swapped))
        if not swapped or kept >= sum(parts):
            largest = max(parts) * each
            yield finding("ZR618", largest=largest, least=least, kept=kept, elements=sum(parts))
    trained = 0 if run.settings.use_peft else sum(parts) / 2  # of the Trainer's two groups one has half or more
    locked, limit = sum(swap_buffers(config, trained).values()), host.lockable()
    if locked > limit:
        yield finding("ZR655", needed=units.size(int(locked)), limit=units.size(int(limit)))
    needed = (
        here * sum(swapped) * (each * (strategy.offload_param == "nvme") + 16 * (strategy.offload_optimizer == "nvme"))
    )
    path = config.offload_block(config.on_nvme[0]).get("nvme_path")
    free = host.free_disk(path) if path and Path(path).is_dir() else None
    if free is not None and needed > free:
        yield finding("ZR619", needed=units.size(needed), path=path, free=units.size(free), here=here)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{units.size(size)} ({what})" for what, size in terms.items() if size)
