"""DeepSpeed's kernels ("ops"): which ones a run loads, what their build lacks, and building them once.

    python -m zero_recipes.engine.kernels OP ...

DeepSpeed compiles an op when it first loads it: silently, on every rank, after the process group has started.
async_io takes two to five minutes on two cores.
torch (utils/file_baton.py) waits while an op's folder has a `lock`, even a killed compiler's.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from zero_recipes.config.ds_config import FORCED
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host import Host
from zero_recipes.core.tables import working

COMPILE_SECONDS = 1800.0  # more for the ranks to join, per op to compile
OP_OF_OPTIMIZER = {"adam": "adam", "adamw": "adam", "adagrad": "adagrad", "lion": "lion", "lamb": "lamb"}
# their builder is a CUDAOpBuilder where there is a GPU (deepspeed/ops/op_builder): they need the CUDA toolkit
BUILT_ON_CUDA = ("fused_adam", "fused_lamb", "fused_lion", "async_io", "quantizer")
QUANTIZING_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def ops_of(strategy: Strategy, device: str, settings: Settings) -> set[str]:
    """Return the ops that DeepSpeed 0.19.8 loads in this run. Paths are relative to deepspeed/."""
    if not strategy.is_deepspeed:
        return set()
    ops = set()
    if device == "cpu":
        ops.add("deepspeed_shm_comm")  # comm/torch.py `build_shm_op`, at every launch
    offloads = strategy.ds.offload_optimizer is not None
    optimizer = _optimizer_with_ops(strategy, settings)
    if offloads and optimizer in ("adam", "adagrad", "lion"):
        ops.add(f"cpu_{optimizer}")
    elif optimizer in ("adam", "lamb", "lion"):
        ops.add(f"fused_{optimizer}")
    if strategy.ds.on_nvme:
        ops.add("async_io")
    # zero/partition_parameters.py `CUDAQuantizer`, comm/coalesced_collectives.py `all_to_all_quant_reduce`
    quantizes = any(strategy.ds.zero.get(key) for key in QUANTIZING_KEYS)
    if device == "cuda" and strategy.zero_stage == 3 and quantizes:
        ops.add("quantizer")
    return ops


def _optimizer_with_ops(strategy: Strategy, settings: Settings) -> str | None:
    """Return the optimizer of the ds_config that has ops (runtime/engine.py `_configure_basic_optimizer`).

    Without one accelerate replaces an offloaded one (utils/deepspeed.py `map_pytorch_optim_to_deepspeed`).
    """
    config = strategy.ds_config.raw
    block = config.get("optimizer")
    if block is not None:
        if (block.get("params") or {}).get("torch_adam"):
            return None
        return OP_OF_OPTIMIZER.get(str(block.get("type")).lower())
    if strategy.ds.offload_optimizer is None or not config.get(FORCED, True):
        return None
    return "adam"


def build_findings(strategy: Strategy, device: str, settings: Settings, host: Host) -> Iterator[Finding]:
    """Yield what the build of this run's ops lacks."""
    ops = {op for op in ops_of(strategy, device, settings) if not is_prebuilt(op, device)}
    to_compile = {op for op in ops if not is_compiled(op, host)}
    on_cuda = ops.intersection(BUILT_ON_CUDA if device == "cuda" else ())
    release = host.cuda_release()
    built_for = torch.version.cuda
    absent = []
    if to_compile and host.compiler() is None:
        absent.append(f"a C++ compiler ({host.environment.get('CXX', 'c++')})")
    if to_compile and not host.python_headers():
        absent.append("Python.h")
    if "async_io" in to_compile and not host.libaio_headers():
        absent.append("libaio.h")
    if on_cuda and release is None:
        absent.append(f"the CUDA toolkit {built_for} (nvcc)")
    if absent:
        yield finding("ZR603", ops=", ".join(sorted(to_compile | on_cuda)), parts=", ".join(absent))
    if device == "cpu" and "fused_adam" in to_compile and not absent:
        yield finding("ZR914", source=strategy.source)
    if on_cuda and release and built_for and release.split(".")[0] != built_for.split(".")[0]:
        yield finding("ZR607", release=release, built_for=built_for, ops=", ".join(sorted(on_cuda)))


def missing(ops: Iterable[str], device: str) -> list[str]:
    """Return those of the ops that are neither installed with DeepSpeed nor compiled."""
    return sorted(op for op in ops if not is_prebuilt(op, device) and not is_compiled(op, Host()))


def is_prebuilt(op: str, device: str) -> bool:
    """Whether an op is installed with DeepSpeed (DS_BUILD_OPS) for this device: op_builder/builder.py `load`."""
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return installed_ops.get(op, False) and accelerator_name == device


def is_compiled(op: str, host: Host) -> bool:
    """Whether this installation of DeepSpeed has compiled an op."""
    if op == "async_io" and not is_compiled("pin_memory", host):  # loaded first, op_builder/async_io.py `load`
        return False
    folder = host.at(extension_folder(host.environment, op))
    library = folder / f"{op}.so"
    rules = folder / "build.ninja"
    if not library.is_file() or not rules.is_file():
        return False
    sources = find_spec("deepspeed").submodule_search_locations[0]
    # torch (utils/cpp_extension.py `_maybe_write`) writes changed rules before ninja compiles
    return rules.stat().st_mtime <= library.stat().st_mtime and f"compile {sources}/" in rules.read_text()


def build_root(environment: Mapping[str, str]) -> Path:
    """Return the folder in which torch builds extensions, and DeepSpeed its kernels."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(environment.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def extension_folder(environment: Mapping[str, str], name: str) -> Path:
    """Return the folder of one extension, as torch/utils/cpp_extension.py `_get_build_directory`."""
    root = build_root(environment)
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return root / name
    device = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return root / f"{python}_{device}" / name


def build(ops: Iterable[str]) -> None:
    """Compile ops, and say which; wait for another process that compiles one."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    for op in ops:
        start = time.monotonic()
        lock = extension_folder(os.environ, op) / "lock"
        holder = _holders().get(lock.resolve())
        doing = f"waiting for process {holder}, which is compiling {op}"
        if holder is None:
            doing = f"compiling {op}, once for this machine (async_io takes minutes, the others less than one)"
        with working(doing):
            ALL_OPS[op].load(verbose=False)
        print(f"compiled {op} in {time.monotonic() - start:.0f} s", flush=True)


def _is_seen(lock: Path) -> bool:
    """Whether a lock's holder could be seen: only root sees another user's."""
    try:
        return os.getuid() in (0, lock.stat().st_uid)
    except FileNotFoundError:  # it has just ended
        return False


def remove_stale_locks() -> None:
    """Delete the build locks of killed compilers: who made one keeps it open (torch, utils/file_baton.py)."""
    locks = {lock.resolve() for lock in build_root(os.environ).rglob("lock") if _is_seen(lock)}
    if not locks:
        return
    for lock in sorted(locks - _holders().keys()):
        print(f"removed the build lock of a killed compiler: {lock}", flush=True)
        lock.unlink(missing_ok=True)


def _holders() -> dict[Path, int]:
    """Return {lock that is held open: process id}."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of another user
            for file in process.open_files():
                if file.path.endswith("/lock"):
                    found[Path(file.path)] = process.pid
    return found


def main(names: list[str]) -> None:
    """Compile ops for runs on CPUs. async_io is left out without libaio."""
    if "async_io" in names and not Host().libaio_headers():
        print("async_io, which NVMe offload needs, is not compiled: libaio.h is missing (apt-get install libaio-dev)")
        names.remove("async_io")
    remove_stale_locks()
    build(missing(names, "cpu"))


if __name__ == "__main__":
    main(sys.argv[1:])
