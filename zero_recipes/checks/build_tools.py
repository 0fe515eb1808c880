"""Checks of what DeepSpeed needs to compile its kernels ("ops"), for those that this run will load."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_recipes.host import Host
from zero_recipes.launch import extension_folder
from zero_recipes.refusal import Finding
from zero_recipes.strategy import Strategy

BY_OPTIMIZER = {"adam": "adam", "adamw": "adam", "adagrad": "adagrad", "lion": "lion", "lamb": "lamb"}
# ops whose builder is a CUDAOpBuilder where there is a GPU (deepspeed/ops/op_builder): they need the CUDA toolkit
ON_CUDA = {"fused_adam", "fused_lamb", "fused_lion", "async_io"}


def build_findings(strategy: Strategy, device: str, values: Mapping[str, Any], host: Host) -> Iterator[Finding]:
    """What is missing to build or to load the ops of this run."""
    ops = {op for op in ops_of(strategy, device, values) if not is_prebuilt(op, device)}
    if not ops:
        return
    named = ", ".join(sorted(ops))
    if Host(environment=with_our_ninja(host)).which("ninja") is None:
        yield Finding(
            "ninja is not installed",
            f"DeepSpeed 0.19.8 (op_builder/builder.py `jit_load`) loads {named} through it, compiled before or not.",
            "pip install ninja",
        )
    compiled = {op for op in ops if is_compiled(op, host)}
    if ops - compiled and host.compiler() is None:
        yield Finding(
            f"there is no C++ compiler ({host.environment.get('CXX', 'c++')})",
            f"This run makes DeepSpeed compile {', '.join(sorted(ops - compiled))} at its first launch.",
            "apt-get install g++ (or your system's package), or set CXX to a compiler.",
        )
    if ops - compiled and not host.python_headers():
        yield Finding(
            "Python's headers (Python.h) are missing",
            f"This run makes DeepSpeed compile {', '.join(sorted(ops - compiled))}, a Python extension.",
            "apt-get install python3-dev (or your system's package for this Python).",
        )
    if "async_io" in ops - compiled and not host.libaio_headers():
        yield Finding(
            "libaio.h is missing, and the ds_config offloads to NVMe",
            "DeepSpeed 0.19.8 (op_builder/async_io.py `is_compatible`) refuses to build async_io without it.",
            "apt-get install libaio-dev, or name its folder in CFLAGS and LDFLAGS.",
        )
    if device == "cuda" and ops & ON_CUDA:
        yield from _toolkit(", ".join(sorted(ops & ON_CUDA)), host)


def ops_of(strategy: Strategy, device: str, values: Mapping[str, Any]) -> set[str]:
    """Names of the ops that DeepSpeed 0.19.8 loads in this run. Paths are relative to deepspeed/.

    runtime/engine.py `_configure_basic_optimizer` for an optimizer block of the ds_config; without one accelerate
    (utils/deepspeed.py `map_pytorch_optim_to_deepspeed`) replaces the Trainer's optimizer where it is offloaded.
    """
    if not strategy.is_deepspeed:
        return set()
    ops = {"deepspeed_shm_comm"} if device == "cpu" else set()  # comm/torch.py `build_shm_op`, at every launch
    config = strategy.ds_config
    block, offloads = config.get("optimizer"), strategy.offload_optimizer is not None
    name = None
    if block is not None and not (block.get("params") or {}).get("torch_adam"):
        name = BY_OPTIMIZER.get(str(block.get("type")).lower())
    elif block is None and offloads and config.get("zero_force_ds_cpu_optimizer", True):
        name = "adagrad" if values["optim"] == "adagrad" else "adam"
    if name is not None and offloads and name != "lamb":
        ops.add(f"cpu_{name}")
    elif name in ("adam", "lamb", "lion"):
        ops.add(f"fused_{name}")
    if "nvme" in (strategy.offload_optimizer, strategy.offload_param):
        ops.add("async_io")
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
    # op_builder/async_io.py `load` loads pin_memory first
    return all(_is_fresh(name, host) for name in (("pin_memory", op) if op == "async_io" else (op,)))


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
    import torch

    release, wanted = host.cuda_release(), torch.version.cuda
    if release is None:
        yield Finding(
            "there is no CUDA toolkit (nvcc)",
            f"This run loads {named}, which DeepSpeed compiles with nvcc; torch (cpp_extension.py `_join_cuda_home`) "
            "stops without it.",
            f"Install the CUDA toolkit {wanted}, or point CUDA_HOME at it; an image whose tag ends in -devel has it. "
            'For Adam, "torch_adam": true in the optimizer block needs no kernel.',
        )
    elif wanted is not None and release.split(".")[0] != wanted.split(".")[0]:
        yield Finding(
            f"the CUDA toolkit is {release}, torch was built with CUDA {wanted}",
            f"This run compiles {named} with it. DeepSpeed 0.19.8 refuses such a pair when it is installed "
            "(op_builder/builder.py `assert_no_cuda_mismatch`), but says nothing when it compiles at launch.",
            f"Point CUDA_HOME at a CUDA {wanted} toolkit, or install torch for CUDA {release}.",
            level="warning",
        )
