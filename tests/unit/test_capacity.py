"""Memory, cores and disk under a run: what a process may take, what a run certainly needs, the refusal between them."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.fake_machine import CONTAINER, ds_config, machine, may_lock, run_of, said, sound_settings
from zero_recipes.checks.capacity import disk_findings, memory_findings, nvme_findings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core import units

GB = 10**9
PSI = 7 * GB  # parameters
CONFIG = SimpleNamespace(dtype=torch.float16)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return sound_settings(tmp_path_factory.mktemp("capacity"))


IN_A_POD = {"/proc/self/cgroup": "0::/kubepods/pod1/c\n"}
POD = "/sys/fs/cgroup/kubepods/pod1"


@pytest.mark.parametrize(
    "files, memory, cores, lockable",
    [
        ({}, 1_024_000_000, 64, math.inf),
        (may_lock(65536, "00000000a80425fb"), 1_024_000_000, 64, 65536),  # Docker's own, even for root
        (may_lock(65536, "00000000a80465fb"), 1_024_000_000, 64, math.inf),  # --cap-add IPC_LOCK
        (may_lock("unlimited"), 1_024_000_000, 64, math.inf),
        ({"/proc/meminfo": "MemAvailable: 1000000 kB\nSwapFree: 500000 kB\n"}, 1_536_000_000, 64, math.inf),
        (IN_A_POD | {f"{POD}/c/memory.max": "max\n", f"{POD}/memory.max": "500000000\n"}
         | {f"{POD}/c/cpu.max": "max 100000\n", f"{POD}/cpu.max": "1250000 100000\n"}, 500_000_000, 12, math.inf),
        (IN_A_POD | {f"{POD}/c/memory.max": "500000000\n", f"{POD}/memory.max": "900000000\n"}
         | {f"{POD}/c/cpu.max": "800000 100000\n", f"{POD}/cpu.max": "1600000 100000\n"}, 500_000_000, 8, math.inf),
        (CONTAINER | {"/sys/fs/cgroup/memory.max": "9000000000\n", "/sys/fs/cgroup/cpu.max": "9900000 100000\n"},
         1_024_000_000, 64, math.inf),  # more than the machine has
        (CONTAINER | {"/sys/fs/cgroup/memory.max": "400000000\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"},
         400_000_000, 1, math.inf),
    ],
)  # fmt: skip
def test_what_a_process_may_take_is_the_least_of_the_host_and_its_cgroups(
    tmp_path, monkeypatch, files, memory, cores, lockable
):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    host = machine(tmp_path, files)
    assert (host.memory()[0], host.cores(), host.lockable()) == (memory, cores, lockable)


@pytest.mark.parametrize(
    "run, needs",
    [
        (dict(stage=2, offload="cpu"), 12 * 7),  # the optimizer of both processes
        (dict(stage=2, offload="cpu", dtype="bfloat16", random_weights=True, world=16), 32 * 7),  # 16 x 2Ψ: loading
        (dict(stage=None), 2 * 4 * 7),  # float32 made of a float16 file, in both processes
        (dict(stage=None, dtype="float16"), 0),  # the file itself is mapped
        (dict(stage=3), 0),
        (dict(stage=1, device="cpu"), (12 + 4 + 4) * 7),  # parameters and gradients whole in both processes
        (dict(stage=3, device="cpu"), 16 * 7),
        (dict(stage=2, device="cpu", use_peft=True), 2 * 2 * 7),
        (dict(stage=3, device="cpu", offload="nvme"), 4 * 7),
    ],
)
def test_host_memory_that_a_run_certainly_needs(settings, tmp_path, run, needs):
    run = run_of(settings, config=CONFIG, **run)
    kib = int(needs * GB / 1024)
    for spare, found in ((-10, needs > 0), (10, False)):
        host = machine(tmp_path, {"/proc/meminfo": f"MemAvailable: {max(kib + spare, 0)} kB\n"})
        findings = list(memory_findings(run, PSI, run.strategy.world_size, host))
        assert [finding.level for finding in findings] == ["error"] * found
        assert not found or f"at least {units.size(needs * GB)} of host memory" in said(findings)


def test_swap_buffers_that_may_not_be_locked_are_refused(settings, tmp_path):
    (tmp_path / "disk").mkdir()
    block = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "buffer_size": 5_000_000, "buffer_count": 5}
    run = run_of(settings, stage=3)
    both = {"offload_param": block, "offload_optimizer": {"device": "nvme", "nvme_path": block["nvme_path"]}}
    for zero, needed in (({"offload_param": block}, 50_000_000), (both, 50_000_000 + 4 * 4 * 2_500_000)):
        strategy = Strategy("z", 2, ds_config({"zero_optimization": zero}, stage=3), "c.json")
        swapping = dataclasses.replace(run, strategy=strategy)
        for limit, codes in ((needed - 1, ["ZR655"]), (needed, [])):
            findings = list(nvme_findings(swapping, [10**7], 2, machine(tmp_path, may_lock(limit))))
            assert [f.code for f in findings if f.level == "error"] == codes


SAVES = dict(save_strategy="steps", max_steps=100, save_steps=50)


@pytest.mark.parametrize(
    "changes, gigabytes",
    [
        (dict(), 2 * 7),  # the model alone
        (dict(save_model=False), 0),
        (SAVES, 2 * 16 * 7 + 14),
        (SAVES | dict(save_total_limit=1), 2 * 16 * 7 + 14),  # the newest is written before the oldest is deleted
        (SAVES | dict(save_steps=10), 10 * 16 * 7 + 14),
        (SAVES | dict(save_only_model=True, stage=3), 2 * 14 + 14),
        (SAVES | dict(stage=3), 2 * 14 * 7 + 14),
        (SAVES | dict(stage=None), 2 * 12 * 7 + 4 * 7),
        (SAVES | dict(use_peft=True), 0),
    ],
)
def test_disk_for_checkpoints_and_the_model(settings, tmp_path, changes, gigabytes):
    """What goes before counts as room."""
    run, free = run_of(settings, config=CONFIG, output_dir=tmp_path / "out", **changes), gigabytes * GB
    assert said(disk_findings(run, PSI, 2, machine(tmp_path / "r", free=free))) == ""
    if gigabytes:
        host = machine(tmp_path / "r", free=free - 1)
        assert f"at least {units.size(free)}, but" in said(disk_findings(run, PSI, 2, host))
        (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
        (tmp_path / "out" / "checkpoint-1" / "model.safetensors").write_bytes(b"0")
        assert said(disk_findings(run, PSI, 2, host)) == ""
