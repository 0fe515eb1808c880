"""What must stand before TrainingArguments: process group, compiled kernels and host threads, under every launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from zero_recipes.config.run import RunConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal, RunFailed
from zero_recipes.core.host_limits import Host
from zero_recipes.core.phases import CLOCK
from zero_recipes.core.process import free_port, local_world_size
from zero_recipes.distributed.build_locks import COMPILE_SECONDS, remove_stale_build_locks, wait_for_builds
from zero_recipes.distributed.kernels import build, missing, ops_of
from zero_recipes.distributed.rendezvous import JOIN_SECONDS, rendezvous


def set_host_threads(
    strategy: Strategy, device: str, environment: Mapping[str, str], host: Host | None = None
) -> int | None:
    """Give DeepSpeedCPUAdam this process's share of the cores; the number of threads, None where nothing was changed.

    Adam on the host is an OpenMP loop (DeepSpeed csrc/includes/cpu_adam.h), as are the sums and norms of offloaded
    gradients; torchrun and accelerate set OMP_NUM_THREADS=1 where the environment has none (torch 2.13
    distributed/run.py `config_from_args`, accelerate 1.15 utils/launch.py). Any other number was somebody's choice and
    stays, and so does the launcher's where the CPU itself trains, for then every rank computes on its cores already.
    """
    if device == "cpu" or not strategy.offload_optimizer or environment.get("OMP_NUM_THREADS", "1") != "1":
        return None
    threads = (host or Host()).threads(local_world_size(environment, strategy.world_size))
    torch.set_num_threads(threads)
    return threads


def host_threads_header(threads: int | None) -> list[str]:
    """The line of a run's header; none where nothing was changed."""
    return [] if threads is None else [f"host threads  {threads} a process for the optimizer on the CPU"]


@contextmanager
def process_group(run: RunConfig) -> Iterator[None]:
    """The run's process group: ready before TrainingArguments, taken down together where the run is refused.

    A run that went well ends it itself (Trainer.end); one that fails ends at once, and its launcher ends the others.
    """
    ops = ops_of(run.strategy, run.device, run.settings)
    start_process_group(run.strategy, run.device, run.settings.ddp_timeout, ops)
    try:
        yield
    except (Refusal, RunFailed):
        end_process_group()
        raise


def start_process_group(strategy: Strategy, device: str, timeout_seconds: int, ops: set[str]) -> None:
    """Start the process group before TrainingArguments does, and prove it (rendezvous.py); raises Refusal.

    With the deepspeed launcher and torchrun on CPU, transformers 5.23 starts no DeepSpeed group (training_args.py
    `_setup_devices`, branch `use_cpu`), zero.Init then sees a world of one, and `ddp_timeout` is dropped.
    `ops`: DeepSpeed's kernels that the run loads (kernels.ops_of), compiled first where missing.
    """
    if strategy.world_size == 1 and not strategy.is_deepspeed:
        if not strategy.is_fsdp:
            # accelerate 1.15 (state.py `_prepare_backend`) takes any process with LOCAL_RANK, which torchrun sets for a
            # single one too, for one of several and wraps the model in DDP: buckets hold every gradient once more
            os.environ.pop("LOCAL_RANK", None)
        return
    # DeepSpeed compiles with ninja, which stands beside the interpreter: a venv need not be activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if "RANK" not in os.environ:  # plain python with DeepSpeed: a world of one
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    timeout = timedelta(seconds=timeout_seconds)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    remove_stale_build_locks()
    to_compile = missing(ops, device)
    if int(os.environ["LOCAL_RANK"]) == 0:
        with CLOCK.phase("startup"):
            wait_for_builds(ops)
            build(missing(to_compile, device))  # others may have compiled them meanwhile
    with CLOCK.phase("startup"):
        rendezvous(backend, timeout, JOIN_SECONDS + COMPILE_SECONDS * len(to_compile))
        if strategy.is_deepspeed:
            import deepspeed

            deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def end_process_group() -> None:
    """Leave together: a rank that exits with a live gloo group can abort the others (exit code -6)."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
