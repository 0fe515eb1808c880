"""DeepSpeed's kernels ("ops"): which ones a run loads, what is missing to build them, and building them once.

    python -m zero_recipes.distributed.kernels OP ...

DeepSpeed compiles an op where it is first loaded: on every rank at once, in silence, after the process group has
started. async_io takes two to five minutes on two cores.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding, print_refusal
from zero_recipes.core.host_limits import Host
from zero_recipes.distributed.build_locks import (
    COMPILE_SECONDS,
    SAY_SECONDS,
    extension_folder,
    names_of,
    remove_stale_build_locks,
    still_locked,
)

BY_OPTIMIZER = {"adam": "adam", "adamw": "adam", "adagrad": "adagrad", "lion": "lion", "lamb": "lamb"}
# ops whose builder is a CUDAOpBuilder where there is a GPU (deepspeed/ops/op_builder): they need the CUDA toolkit
ON_CUDA = {"fused_adam", "fused_lamb", "fused_lion", "async_io", "quantizer"}

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def build_findings(strategy: Strategy, device: str, settings: Settings, host: Host) -> Iterator[Finding]:
    """What is missing to build or to load the ops of this run."""
    ops = {op for op in ops_of(strategy, device, settings) if not is_prebuilt(op, device)}
    if not ops:
        return
    named = ", ".join(sorted(ops))
    if Host(environment=with_our_ninja(host)).which("ninja") is None:
        yield finding("ZR602", named=named)
    compiled = {op for op in ops if is_compiled(op, host)}
    if ops - compiled and host.compiler() is None:
        yield finding("ZR603", cxx=host.environment.get("CXX", "c++"), ops=", ".join(sorted(ops - compiled)))
    if ops - compiled and not host.python_headers():
        yield finding("ZR604", ops=", ".join(sorted(ops - compiled)))
    if "async_io" in ops - compiled and not host.libaio_headers():
        yield finding("ZR605")
    if device == "cuda" and ops & ON_CUDA:
        yield from _toolkit(", ".join(sorted(ops & ON_CUDA)), host)


def ops_of(strategy: Strategy, device: str, settings: Settings) -> set[str]:
    """Names of the ops that DeepSpeed 0.19.8 loads in this run. Paths are relative to deepspeed/.

    runtime/engine.py `_configure_basic_optimizer` for an optimizer block of the ds_config; without one accelerate
    (utils/deepspeed.py `map_pytorch_optim_to_deepspeed`) replaces the Trainer's optimizer where it is offloaded.
    """
    if not strategy.is_deepspeed:
        return set()
    ops = {"deepspeed_shm_comm"} if device == "cpu" else set()  # comm/torch.py `build_shm_op`, at every launch
    config = strategy.ds_config.raw
    block, offloads = config.get("optimizer"), strategy.offload_optimizer is not None
    name = None
    if block is not None and not (block.get("params") or {}).get("torch_adam"):
        name = BY_OPTIMIZER.get(str(block.get("type")).lower())
    elif block is None and offloads and config.get("zero_force_ds_cpu_optimizer", True):
        name = "adagrad" if settings.optim == "adagrad" else "adam"
    if name is not None and offloads and name != "lamb":
        ops.add(f"cpu_{name}")
    elif name in ("adam", "lamb", "lion"):
        ops.add(f"fused_{name}")
    if "nvme" in (strategy.offload_optimizer, strategy.offload_param):
        ops.add("async_io")
    # zero/partition_parameters.py `CUDAQuantizer`, comm/coalesced_collectives.py `all_to_all_quant_reduce`
    if device == "cuda" and strategy.zero_stage == 3 and any(config["zero_optimization"].get(key) for key in QUANTIZED):
        ops.add("quantizer")
    return ops


def is_prebuilt(op: str, device: str) -> bool:
    """Installed with DeepSpeed (DS_BUILD_OPS), for this kind of device: op_builder/builder.py `load`."""
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return installed_ops.get(op, False) and accelerator_name == device


def is_compiled(op: str, host: Host) -> bool:
    """Whether an earlier launch has left it where torch looks for it, and ninja would find nothing to do there.

    torch (utils/cpp_extension.py, `_write_ninja_file_to_build_library`) writes build.ninja anew in every process. What
    another environment has compiled, with the paths of its DeepSpeed, torch and Python or with another compiler, ninja
    then compiles again, inside the run; so it does after an update, whose headers are newer.
    """
    return all(_is_fresh(name, host) for name in names_of(op))


def _is_fresh(op: str, host: Host) -> bool:
    from torch.utils import cpp_extension

    folder = host.at(extension_folder(host.environment, op))
    if not (folder / f"{op}.so").is_file() or not (folder / "build.ninja").is_file():
        return False
    written = (folder / "build.ninja").read_text()
    deepspeed = Path(importlib.util.find_spec("deepspeed").origin).parent
    here = [f"cxx = {host.environment.get('CXX', 'c++')}\n", f" {deepspeed}/ops/csrc/"]
    here += [f"-isystem {path} " for path in (cpp_extension.include_paths()[0], sysconfig.get_path("include"))]
    if not all(part in written for part in here):
        return False
    ninja = Host(environment=with_our_ninja(host)).which("ninja")
    looked = ninja and subprocess.run([ninja, "-n", "-C", folder], capture_output=True, text=True)
    return bool(looked) and "no work to do" in looked.stdout


def with_our_ninja(host: Host) -> dict[str, str]:
    """The PATH on which DeepSpeed finds ninja: it stands beside the interpreter, a venv need not be activated."""
    return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{host.environment.get('PATH', '')}"}


def _toolkit(named: str, host: Host) -> Iterator[Finding]:

    release, wanted = host.cuda_release(), torch.version.cuda
    if release is None:
        yield finding("ZR606", named=named, wanted=wanted)
    elif wanted is not None and release.split(".")[0] != wanted.split(".")[0]:
        yield finding("ZR607", release=release, wanted=wanted, named=named)


def missing(ops: Iterable[str], device: str) -> list[str]:
    """Those that neither came with DeepSpeed's installation nor were compiled by an earlier launch."""
    return sorted(op for op in ops if not is_prebuilt(op, device) and not is_compiled(op, Host()))


def build(ops: Iterable[str]) -> None:
    """Compile these ops into torch's folder of extensions, one after another, and say how it goes."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    # DeepSpeed compiles with ninja, which stands beside the interpreter: a venv need not be activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for op in ops:
        start, done = time.monotonic(), threading.Event()
        print(f"compiling {op}, once for this machine (async_io takes minutes, others less than one)", flush=True)
        threading.Thread(target=_say_that_it_goes_on, args=(op, start, done), daemon=True).start()
        try:
            ALL_OPS[op].load(verbose=False)
        finally:
            done.set()
        print(f"compiled {op} in {time.monotonic() - start:.0f} s", flush=True)


def _say_that_it_goes_on(op: str, start: float, done: threading.Event) -> None:
    """Until it is done; where it takes too long this process ends, for its main thread may wait in torch for ever."""
    waited = 0
    while not done.wait(SAY_SECONDS):
        print(f"still compiling {op}, {time.monotonic() - start:.0f} s", flush=True)
        waited += SAY_SECONDS
        if waited > COMPILE_SECONDS:
            os._exit(print_refusal(still_locked(extension_folder(os.environ, op), COMPILE_SECONDS)))


def main(names: list[str]) -> None:
    """Compile what is missing of `names` for runs on CPUs; async_io is left out where libaio is not installed."""
    if "async_io" in names and not Host().libaio_headers():
        print("async_io is not compiled: there is no libaio.h (apt-get install libaio-dev); NVMe offload needs it")
        names = [name for name in names if name != "async_io"]
    remove_stale_build_locks()
    build(missing(names, "cpu"))


if __name__ == "__main__":
    main(sys.argv[1:])
