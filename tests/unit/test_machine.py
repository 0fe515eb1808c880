"""The machine under a run, as a fake root shows it: each bad machine is found, its fixed twin passes.

No GPU is needed: the driver, the cards and the network are files and numbers here. Its memory and disk are in
test_capacity.py, what it lacks to build kernels in test_kernels.py.
"""

import os
import re
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.helpers.fake_machine import (
    CXX,
    DRIVER,
    MODULE,
    OPEN,
    PYTHON_H,
    SEEN,
    ds_config,
    machine,
    run_of,
    said,
    sound_settings,
)
from tests.helpers.faults import Side
from tests.helpers.tiny import write_recipe
from zero_recipes.checks import machine as machines
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.host import Host
from zero_recipes.core.run_end import print_ending
from zero_recipes.model.config import load_config
from zero_recipes.tools import main as cli

# the driver and the cards


@pytest.mark.parametrize(
    "files, variables, use_cpu, built, available, found",
    [
        (DRIVER, {}, False, "13.0", False, "driver 550.54.15, /dev/nvidia0"),
        ({"/proc/driver/nvidia/version": MODULE.format(OPEN, "570.86.15")}, {}, False, "13.0", False, "570.86.15"),
        (DRIVER, {}, True, "13.0", False, None),
        (DRIVER, {"CUDA_VISIBLE_DEVICES": "-1"}, False, "13.0", False, None),
        ({"/dev/nvidiactl": "", "/dev/nvidia-uvm": ""}, {}, False, "13.0", False, None),  # a laptop
        (DRIVER, {}, False, None, False, None),
        (DRIVER, {}, False, "13.0", True, None),
    ],
)
def test_an_unusable_gpu_is_refused(tmp_path, monkeypatch, files, variables, use_cpu, built, available, found):
    """Where the CPU is not meant."""
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    findings = list(machines.driver_findings(use_cpu, machine(tmp_path, files, **variables), lambda: "too old"))
    assert [(f.code, f.scope) for f in findings] == ([("ZR650", "machine")] if found else [])
    assert all(found in f.what and "too old" in f.why and "driver 580" in f.why for f in findings)


def test_cards_without_bf16_are_refused(monkeypatch):
    found = [((8, 0), "A100"), ((7, 5), "Tesla T4"), ((7, 0), "V100")]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(found))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda number: found[number][0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: found[number][1])
    codes = {precision: [f.code for f in machines.card_findings(precision)] for precision in ("bf16", "fp16")}
    assert codes == {"bf16": ["ZR272", "ZR272"], "fp16": []}
    assert "GPU 1 (Tesla T4), which has compute capability 7.5" in said(machines.card_findings("bf16"))


@pytest.mark.parametrize(
    ("gpu", "keys", "codes"),
    [
        ("h100-80gb", {"bf16": False, "fp16": True, "tf32": True, "attn_implementation": "flash_attention_2"}, []),
        ("t4", {"bf16": False, "fp16": True, "tf32": True, "attn_implementation": "flash_attention_2"}, ["ZR870"]),
        ("t4", {"bf16": True}, ["ZR870"]),
    ],
)
def test_check_judges_for_a_card_that_is_not_here(tmp_path, capsys, gpu, keys, codes):
    recipe = write_recipe(tmp_path, deepspeed="ds_configs/zero2.json", skip_plan=True, **keys)
    argv = ["check", str(recipe), "--num_processes", "2", "--output_dir", str(tmp_path / "out")]
    assert cli.main([*argv, "--gpu", gpu]) == (2 if codes else 0)
    said = capsys.readouterr().out
    assert re.findall(r"\[(ZR\d+)\]$", said, re.MULTILINE) == codes and "world size    2 on cuda" in said
    launch = f"zero-recipes train {recipe} --num_processes 2 --output_dir {tmp_path / 'out'}"
    assert (said.splitlines()[-1] == launch) == (not codes)
    assert (f"zero-recipes rehearse {recipe} --output_dir {tmp_path / 'out'} --gpus 2\n" in said) == (not codes)


QGZ = ds_config({"zero_optimization": {"zero_quantized_gradients": True}}, stage=3)


@pytest.mark.parametrize(
    "strategy, here, gpus, variables, codes",
    [
        (Strategy("ddp", 2), 2, 8, {}, ["ZR354"]),
        (Strategy("ddp", 8), 8, 8, {}, []),
        (Strategy("ddp", 2), 2, 8, {"CUDA_VISIBLE_DEVICES": "0,1"}, []),
        (Strategy("z", 8, QGZ, "c.json"), 4, 4, {"CUDA_VISIBLE_DEVICES": "all"}, []),
        (Strategy("z", 8, QGZ, "c.json"), 4, 8, {"CUDA_VISIBLE_DEVICES": "all"}, ["ZR268"]),
        (Strategy("z", 4, QGZ, "c.json"), 4, 8, {}, ["ZR354"]),  # nothing is quantized on one machine
    ],
)
def test_gpus_that_no_process_takes(monkeypatch, strategy, here, gpus, variables, codes):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = list(machines.count_findings(strategy, here, variables))
    assert [finding.code for finding in found] == codes
    assert all("--num_processes 8" in finding.fix for finding in found if strategy.name == "ddp")


# what a container lacks or hides

GCC = {"/usr/bin/gcc": "#!/bin/sh\n"}


@pytest.mark.parametrize(
    "device, host, found",
    [
        ("cuda", dict(files=GCC), ""),
        ("cuda", dict(), "lacks the C compiler gcc or clang [ZR652]"),  # c++ is there, which Triton does not call
        ("cpu", dict(), ""),
        ("cuda", dict(files={"/usr/bin/clang": ""}), ""),
        ("cuda", dict(files=GCC, CC="icx -O2"), "compiler icx -O2 "),
        ("cuda", dict(files=GCC, lacks=PYTHON_H), "lacks Python's headers (Python.h) [ZR652]"),
        ("cuda", dict(files=GCC, TRITON_CACHE_DIR="/closed/cache"), "lacks the right to write to /closed/cache"),
    ],
)
def test_triton_needs_a_compiler_headers_and_a_cache(tmp_path, monkeypatch, device, host, found):
    monkeypatch.setattr("transformers.utils.is_triton_available", lambda: True)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")  # root may write everywhere
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Host, "which", lambda host, name: (host.root / "usr" / "bin" / name).exists())
    text = said(machines.triton_findings(device, machine(tmp_path, **({"HOME": "/home/me"} | host))))
    assert found in text and bool(found) == bool(text)


OPENED = SEEN | {"/dev/infiniband/uverbs3": ""}


@pytest.mark.parametrize(
    "files, variables, found",
    [
        ({}, {}, ""),
        (SEEN, {}, "(mlx5_0), but this user or container cannot open /dev/infiniband/uverbs*"),
        (SEEN, {"NCCL_IB_DISABLE": "1"}, ""),
        (OPENED, {}, ""),
    ],
)
def test_infiniband_that_a_container_only_sees_is_named(tmp_path, files, variables, found):
    host = machine(tmp_path, files)
    text = said(machines.infiniband_findings("cuda", True, variables, host))
    assert found in text and bool(found) == text.startswith("warning")
    assert said(machines.infiniband_findings("cuda", False, variables, host)) == ""


def test_results_outside_of_a_pods_volume_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    pod = machine(tmp_path, RUNPOD_POD_ID="x")
    assert "[ZR615]" in said(machines.volume_findings(Path("out"), pod))
    for path, host in (("/workspace/out", pod), ("out", machine(tmp_path))):
        assert said(machines.volume_findings(Path(path), host)) == ""


# the hub


@pytest.fixture
def online(monkeypatch):
    """As on a machine that may ask the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


def test_a_silent_hub_is_asked_once_and_then_left_alone(tmp_path, online, monkeypatch, capsys):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # takes connections, and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(machines, "PROBE_SECONDS", 0.2)
        Side(recipe="model_name_or_path: nobody/has-this\nrandom_weights: true").write(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert cli.main(["check", "recipe.yaml"]) == 2
        assert os.environ["HF_HUB_OFFLINE"] == "1" and datasets.config.HF_HUB_OFFLINE
        text = capsys.readouterr().out
        assert text.count("[ZR430]") == 1 and text.count("[ZR444]") == 1


# whom it refuses, and who says so


def test_one_bad_machine_refuses_a_run_and_only_warns_where_a_run_elsewhere_is_checked(tmp_path):
    settings = sound_settings(tmp_path)
    run = run_of(settings, device="cpu", output_dir=tmp_path, config=load_config(settings))
    asked_for_a_cpu = SimpleNamespace(settings=settings.replace(use_cpu=True))
    asked_for_gpus = SimpleNamespace(settings=settings.replace(use_cpu=False))
    for starts_now, recipe, level in (
        (True, asked_for_gpus, "error"),
        (False, asked_for_a_cpu, "error"),
        (False, asked_for_gpus, "warning"),
    ):
        looked_at = replace(run, recipe=recipe, starts_now=starts_now)
        (finding,) = machines.machine_findings(looked_at, machine(tmp_path, lacks=CXX))
        assert (finding.level, finding.scope) == (level, "machine")
        assert finding.what.startswith("on this machine") == (level == "warning")
    assert machines.machine_findings(run, machine(tmp_path / "fixed")) == []


def test_check_refuses_a_machine_that_the_recipe_means(tmp_path, monkeypatch, capsys):
    """The verb itself: a machine without a compiler, and one whose GPU torch cannot use."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipe = write_recipe(tmp_path, deepspeed="ds_configs/zero2.json")
    argv = ["check", str(recipe), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    assert cli.main([*argv, "true"]) == 2
    assert "refused: DeepSpeed cannot compile" in capsys.readouterr().out
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machines, "driver_version", lambda host: "550.54.15")
    assert cli.main([*argv, "false"]) == 2
    assert "[ZR650]" in capsys.readouterr().out


def test_each_finding_is_said_by_the_ranks_of_its_scope(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    findings = [Finding("ZR000", scope, f"w {scope}", "c", scope=scope) for scope in ("run", "machine", "rank")]
    for rank, local_rank, says in ((0, 0, ["run", "machine", "rank"]), (8, 0, ["machine", "rank"]), (9, 1, ["rank"])):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert print_ending(Refusal(findings)) == 2
        heard = [line.removeprefix("refused: ") for line in capsys.readouterr().err.splitlines() if "refused" in line]
        assert heard == [f"{scope} [ZR000]" for scope in says]
