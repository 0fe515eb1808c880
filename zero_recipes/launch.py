"""What must stand before TrainingArguments: device, environment and process group, the same under every launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from zero_recipes.process import free_port, local_world_size, rank
from zero_recipes.recipe import Recipe
from zero_recipes.refusal import Refusal
from zero_recipes.rendezvous import JOIN_SECONDS, meet
from zero_recipes.strategy import Strategy

COMPILE_SECONDS = 1800  # more for the ranks to come together, for each op that the first of a machine compiles


@dataclass(frozen=True)
class Run:
    """One run, ready to start: nothing that could refuse it cheaply has."""

    recipe: Recipe
    strategy: Strategy
    device: str  # "cpu" or "cuda"
    output_dir: Path


def choose_device(recipe: Recipe) -> str:
    """ "cpu" or "cuda": `use_cpu` is taken from the recipe, and found where there is no accelerator."""
    if not torch.cuda.is_available():
        recipe.values["use_cpu"] = recipe.given["use_cpu"] = True
    if recipe.values["use_cpu"]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return "cpu"
    return "cuda"


def refuse_data_parallel(strategy: Strategy, device: str, environment: Mapping[str, str]) -> None:
    """One plain process with several GPUs would become nn.DataParallel, which SFTTrainer does not take."""
    count = torch.cuda.device_count() if device == "cuda" else 1
    if strategy.world_size == 1 and "RANK" not in environment and count > 1:
        raise Refusal(
            f"one process, but {count} GPUs are visible",
            "transformers would split batches with nn.DataParallel, which TRL's SFTTrainer refuses.",
            "accelerate launch --config_file accelerate_configs/zero2.yaml run_sft.py RECIPE.yaml, or make one GPU "
            "visible with CUDA_VISIBLE_DEVICES=0.",
        )


def refuse_shared_gpus(strategy: Strategy, device: str, environment: Mapping[str, str]) -> None:
    """More processes than GPUs on this machine: NCCL does not take two ranks on one device."""
    here = local_world_size(environment, strategy.world_size)
    count = torch.cuda.device_count() if device == "cuda" else here
    if here > count:
        raise Refusal(
            f"{here} processes on this machine, but {count} GPU{'s' if count > 1 else ''}",
            'NCCL (init.cc, "Duplicate GPU detected") stops two ranks on one device, after the model has been loaded.',
            f"--num_processes {count}, or use_cpu: true for a run on the CPU.",
        )


def start_process_group(strategy: Strategy, device: str, timeout_seconds: int, ops: set[str]) -> None:
    """Start the process group before TrainingArguments does, and prove it (rendezvous.py); raises Refusal.

    With the deepspeed launcher and torchrun on CPU, transformers 5.23 starts no DeepSpeed group (training_args.py
    `_setup_devices`, branch `use_cpu`), zero.Init then sees a world of one, and `ddp_timeout` is dropped.
    `ops`: DeepSpeed's kernels that the run loads (checks/build_tools.py, ops_of), compiled first where missing.
    """
    if strategy.world_size == 1 and not strategy.is_deepspeed:
        return
    # DeepSpeed compiles with ninja, which stands beside the interpreter: a venv need not be activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if "RANK" not in os.environ:  # plain python with DeepSpeed: a world of one
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    from zero_recipes.ops import build, missing  # it takes build_root from here

    timeout = timedelta(seconds=timeout_seconds)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    remove_stale_build_locks()
    to_compile = missing(ops, device)
    if to_compile and int(os.environ["LOCAL_RANK"]) == 0:
        build(to_compile)
    meet(backend, timeout, JOIN_SECONDS + COMPILE_SECONDS * len(to_compile))
    if strategy.is_deepspeed:
        import deepspeed

        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def build_root(environment: Mapping[str, str]) -> Path:
    """The folder that torch builds extensions in, and DeepSpeed its kernels."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(environment.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def extension_folder(environment: Mapping[str, str], name: str) -> Path:
    """The folder of one extension: torch/utils/cpp_extension.py, `_get_build_directory`."""
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"], name)
    from torch.utils.cpp_extension import get_default_build_root

    release = torch.version.hip or torch.version.cuda
    device = f"{'rocm' if torch.version.hip else 'cu'}{release.replace('.', '')}" if release else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(get_default_build_root(), f"{python}_{device}", name)


def stale_build_locks(root: Path) -> list[Path]:
    """Locks that a killed compiler left: torch would wait for them for ever, without a word.

    torch/utils/file_baton.py waits while `lock` exists in the extension's build folder. Nobody holds it if it is older
    than this process (its sisters start with it) and no compiler is at work.
    """
    import psutil

    started = psutil.Process().create_time()
    locks = [lock for lock in root.rglob("lock") if lock.stat().st_mtime < started - 1]
    compilers = ("ninja", "c++", "g++", "cc1plus", "nvcc", "cicc", "ptxas")
    if locks and any(p.info["name"] in compilers for p in psutil.process_iter(["name"])):
        return []
    return locks


def remove_stale_build_locks() -> None:
    """Delete them, on rank 0 alone, and say so."""
    if rank():
        return
    for lock in stale_build_locks(build_root(os.environ)):
        print(f"removed a build lock that a killed compiler left: {lock}", flush=True)
        lock.unlink()


def choose_output_dir(recipe: Recipe) -> Path:
    """The recipe's output_dir, or output/<recipe>: TRL would write into `trainer_output` for every recipe."""
    if recipe.values.get("output_dir") is None:
        recipe.values["output_dir"] = recipe.given["output_dir"] = f"output/{recipe.name}"
    return Path(recipe.values["output_dir"])


def end_process_group() -> None:
    """Leave together: a rank that exits with a live gloo group can abort the others (exit code -6)."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
