"""DeepSpeed's kernels: what is missing to build them on a machine, and where torch puts them."""

import os

import deepspeed
import pytest
from torch.utils.cpp_extension import _get_build_directory

from tests.helpers.fake_machine import CXX, PYTHON_H, ds_config, machine, said
from tests.helpers.tiny import settings_with
from zero_recipes.config.strategy import Strategy
from zero_recipes.engine.kernels import build_findings, extension_folder

ADAM = {"optimizer": {"type": "AdamW", "params": {}}}
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
AIO = "/usr/include/libaio.h"


def nvcc(release: str) -> str:
    return f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n"


def compiled(*ops: str) -> dict[str, str]:
    rules = {f"/extensions/{op}/build.ninja": f"compile {deepspeed.__path__[0]}/ops/csrc" for op in ops}
    return rules | {f"/extensions/{op}/{op}.so": "" for op in ops}


COMPILED = compiled("deepspeed_shm_comm", "async_io")


@pytest.mark.parametrize(
    "device, config, offload, host, found",
    [
        ("cpu", {}, None, dict(lacks=CXX), "lacks a C++ compiler (c++) [ZR603]"),
        ("cuda", {}, None, dict(lacks=CXX), ""),  # nothing is built
        ("cpu", {}, None, dict(lacks=CXX, files={"/usr/bin/clang++": ""}, CXX="clang++"), ""),
        ("cpu", {}, None, dict(lacks=CXX, files=COMPILED), ""),  # compiled before
        ("cpu", {}, "cpu", dict(lacks=CXX, files=COMPILED), "cannot compile cpu_adam because"),
        ("cpu", {}, None, dict(lacks=PYTHON_H), "Python.h"),
        ("cpu", NVME, "nvme", dict(), ""),
        ("cpu", NVME, "nvme", dict(lacks=AIO), "lacks libaio.h"),
        ("cpu", NVME, "nvme", dict(lacks=AIO, files=COMPILED), "lacks libaio.h"),  # async_io loads pin_memory first
        ("cpu", NVME, "nvme", dict(lacks=AIO, files=COMPILED | compiled("pin_memory")), ""),
        ("cpu", NVME, "nvme", dict(lacks=AIO, files={"/opt/aio/libaio.h": ""}, CFLAGS="-O2 -I/opt/aio"), ""),
        ("cpu", ADAM, None, dict(), "first compiles fused_adam [ZR914]"),
        ("cpu", ADAM, None, dict(files=compiled("deepspeed_shm_comm", "fused_adam")), ""),
        ("cpu", {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None, dict(), ""),
        ("cuda", ADAM, None, dict(), "lacks the CUDA toolkit 13.0 (nvcc) [ZR603]"),
        ("cuda", {}, "cpu", dict(), ""),  # cpu_adam is plain C++ on a GPU machine too
        ("cuda", {"zero_force_ds_cpu_optimizer": False}, "cpu", dict(lacks=CXX), ""),
        ("cuda", {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None, dict(), ""),
        ("cuda", {"optimizer": {"type": "Lion"}}, None, dict(), "cannot compile fused_lion"),
        ("cuda", {"optimizer": {"type": "SGD"}}, None, dict(), ""),
        ("cuda", NVME, "nvme", dict(lacks=CXX), "cannot compile async_io, cpu_adam"),
        ("cuda", ADAM, None, dict(files={"/usr/bin/nvcc": nvcc("12.4")}), "torch was built with CUDA 13.0 [ZR607]"),
        ("cuda", ADAM, None, dict(files={"/usr/local/cuda/bin/nvcc": nvcc("13.1")}), ""),
    ],
)
def test_what_is_missing_to_build_the_ops(tmp_path, monkeypatch, device, config, offload, host, found):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    strategy = Strategy("zero2", 2, ds_config(config, offload), "c.json")
    text = said(build_findings(strategy, device, settings_with(), machine(tmp_path, **host)))
    assert found in text and bool(found) == bool(text)


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_the_folder_of_an_extension_is_torchs(monkeypatch, tmp_path, cuda):
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(extension_folder(os.environ, "some_op")) == _get_build_directory("some_op", False)
