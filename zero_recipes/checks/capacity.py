"""Checks of room: memory of the host, disk for checkpoints and downloads, shared memory. All bytes are lower bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from zero_recipes.checkpoint.output_dir import previous_of, saved_in
from zero_recipes.checks.lower_bounds import batch_bytes, disk_terms, host_terms
from zero_recipes.config.run import RunConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core import units
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host

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
        yield finding(
            "ZR608",
            size=units.size(sum(terms.values())),
            size_2=units.size(limit),
            sum=_sum(terms),
            psi=psi,
            here=here,
            why="es" if here > 1 else "",
            source=source,
            fixes=fixes,
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
        yield finding(
            "ZR641",
            checkpoint=run.checkpoint,
            size=units.size(read),
            size_2=units.size(limit),
            here=here,
            size_3=units.size(read // here),
            source=source,
        )


def disk_findings(run: RunConfig, config, psi: int, here: int, host: Host) -> Iterator[Finding]:
    """More to save than the disk takes: the run would end at its first checkpoint or, trained, at its last line."""
    terms = disk_terms(run.strategy, run.settings, config, psi, here)
    free = host.free_disk(run.output_dir)
    # what goes before: under overwrite the run before the last one, else checkpoints, one by one by save_total_limit
    leaving = [previous_of(run.output_dir)] if run.settings.overwrite else saved_in(run.output_dir)
    going = sum(path.stat().st_size for folder in leaving for path in _files(folder))
    if sum(terms.values()) > free + going:
        yield finding(
            "ZR609",
            output_dir=run.output_dir,
            size=units.size(sum(terms.values())),
            size_2=units.size(free),
            sum=_sum(terms),
        )


def download_findings(settings: Settings, psi: int, cache: Path, host: Host) -> Iterator[Finding]:
    """Weights that are still to be downloaded and do not fit; 16 bits each is the least that a hub file has."""
    free = host.free_disk(cache)
    if 2 * psi > free:
        yield finding(
            "ZR610",
            model_name_or_path=settings.model_name_or_path,
            size=units.size(2 * psi),
            cache=cache,
            size_2=units.size(free),
        )


def shared_memory_findings(run: RunConfig, here: int, host: Host) -> Iterator[Finding]:
    """/dev/shm too small. Warnings: NCCL takes none of it between GPUs that reach each other directly."""
    free, settings = host.shared_memory(), run.settings
    larger = "docker run --ipc=host, or --shm-size=1g and more; on Kubernetes an emptyDir of medium Memory at /dev/shm."
    if free is None:
        return
    if run.device == "cuda" and here > 1 and free < NCCL_WANTS:
        yield finding("ZR611", size=units.size(free), here=here, larger=larger)
    ahead = settings.dataloader_num_workers * (settings.dataloader_prefetch_factor or 2)
    queued = here * ahead * batch_bytes(settings)
    if queued > free:
        yield finding("ZR612", size=units.size(free), size_2=units.size(queued), here=here, larger=larger)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{units.size(size)} ({what})" for what, size in terms.items() if size)
