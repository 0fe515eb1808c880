"""Checks of room: memory of the host, disk for checkpoints and downloads, shared memory. All bytes are lower bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from zero_recipes.checkpoint.output_dir import saved_in
from zero_recipes.config.run import RunConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core import units
from zero_recipes.core.errors import Finding
from zero_recipes.core.host_limits import Host
from zero_recipes.theory.lower_bounds import batch_bytes, disk_terms, host_terms

NCCL_WANTS = 10**9  # bytes of /dev/shm: NVIDIA's documentation starts containers with --shm-size=1g


def memory_findings(run: RunConfig, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More host memory than there is: the kernel would kill a process, with exit code -9 and no message."""
    terms = host_terms(run.strategy, run.device, run.settings, config, psi, here)
    limit, source = host.memory()
    if sum(terms.values()) > limit:
        fixes = "A machine with more memory, fewer processes on it"
        if "weights while loading" in terms:
            fixes += ", stage 3 (it loads in parts), or dtype: bfloat16"
        elif run.device == "cuda":
            fixes += ", or a ds_config that offloads less"
        yield Finding(
            "ZR608",
            f"the run needs at least {units.size(sum(terms.values()))} of host memory, and {units.size(limit)} can be "
            "had",
            f"{_sum(terms)} for {psi:,} parameters in {here} process{'es' if here > 1 else ''}; the limit is {source}.",
            f"{fixes}.",
        )


def resume_findings(run: RunConfig, here: int, host: Host) -> Iterator[Finding]:
    """A checkpoint that does not fit into the host's memory while it is read: a run that could be trained, not resumed.

    DeepSpeed 0.19.8 (runtime/engine.py, load_checkpoint) reads on every process all of *_model_states.pt, drops it, and
    reads the process's own *_optim_states.pt, both by torch.load(map_location="cpu").
    """
    if run.checkpoint is None or not run.strategy.is_deepspeed:
        return
    sizes = [path.stat().st_size for path in Path(run.checkpoint).glob("global_step*/*_states.pt")]
    read = here * max(sizes, default=0)
    limit, source = host.memory()
    if read > limit:
        yield Finding(
            "ZR641",
            f"going on from {run.checkpoint} reads {units.size(read)} into host memory, and {units.size(limit)} can be "
            "had",
            f"Each of the {here} processes of this machine reads {units.size(read // here)} at once (DeepSpeed 0.19.8, "
            f"runtime/engine.py load_checkpoint; deepspeedai/DeepSpeed#3938); the limit is {source}.",
            "A machine with more memory; zero-recipes reshard to more processes on more machines; or train from the "
            "checkpoint's weights with --model_name_or_path.",
        )


def disk_findings(run: RunConfig, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More to save than the disk takes: the run would end at its first checkpoint or, trained, at its last line."""
    terms = disk_terms(run.strategy, run.settings, config, psi, here)
    free = host.free_disk(run.output_dir)
    # an earlier run's checkpoints go: all under overwrite, one by one under save_total_limit
    going = sum(path.stat().st_size for folder in saved_in(run.output_dir) for path in _files(folder))
    if sum(terms.values()) > free + going:
        yield Finding(
            "ZR609",
            f"{run.output_dir} must take at least {units.size(sum(terms.values()))}, and its disk has "
            f"{units.size(free)} free",
            f"{_sum(terms)}. The newest checkpoint is written before the oldest is deleted "
            "(transformers/trainer_utils.py `rotate_checkpoints`).",
            "Another --output_dir, a smaller save_total_limit, --save_only_model true (no resuming), or "
            '--save_strategy "no".',
        )


def download_findings(settings: Settings, psi: int, cache: Path, host: Host) -> Iterator[Finding]:
    """Weights that are still to be downloaded and do not fit; 16 bits each is the least that a hub file has."""
    free = host.free_disk(cache)
    if 2 * psi > free:
        yield Finding(
            "ZR610",
            f"the weights of {settings.model_name_or_path} are at least {units.size(2 * psi)}, and {cache} has "
            f"{units.size(free)} free",
            "They are not in the cache yet; the download would end with the disk full.",
            "Free the disk, or set HF_HOME to a folder on a larger one.",
        )


def shared_memory_findings(run: RunConfig, here: int, host: Host) -> Iterator[Finding]:
    """/dev/shm too small. Warnings: NCCL takes none of it between GPUs that reach each other directly."""
    free, settings = host.shared_memory(), run.settings
    larger = "docker run --ipc=host, or --shm-size=1g and more; on Kubernetes an emptyDir of medium Memory at /dev/shm."
    if free is None:
        return
    if run.device == "cuda" and here > 1 and free < NCCL_WANTS:
        yield Finding(
            "ZR611",
            f"/dev/shm has {units.size(free)} free, for {here} GPUs",
            "GPUs without peer access use it, 10 MB a connection; Docker gives 64 MB, and NCCL ends with "
            '"No space left on device" (github.com/NVIDIA/nccl issues 290 and 342; its documentation takes 1 GB).',
            larger,
            level="warning",
        )
    ahead = settings.dataloader_num_workers * (settings.dataloader_prefetch_factor or 2)
    queued = here * ahead * batch_bytes(settings)
    if queued > free:
        yield Finding(
            "ZR612",
            f"/dev/shm has {units.size(free)} free, and the data loaders put up to {units.size(queued)} there",
            f"{here} x dataloader_num_workers x prefetched batches; a worker that finds it full dies of a bus error "
            "(torch/csrc/DataLoader.cpp).",
            f"dataloader_num_workers: 0 (tokens are ready before training), or {larger}",
            level="warning",
        )


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{units.size(size)} ({what})" for what, size in terms.items() if size)
