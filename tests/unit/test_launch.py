"""Before the process group: stale build locks go, live ones stay; compiling prints how it goes and has an end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

from zero_recipes.config.run import refuse_uneven_gpus
from zero_recipes.core.findings import Refusal
from zero_recipes.distributed.kernels import remove_stale_locks, stale_locks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def locks(tmp_path, monkeypatch) -> Path:
    """A folder of extensions, two of them with a lock: one is older than this process."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("old", "young"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
    os.utime(tmp_path / "old" / "lock", (1.0, 1.0))
    return tmp_path


def test_a_stale_build_lock_is_removed_and_a_live_one_stays(locks, capsys):
    """A stale lock hangs every later launch silently (torch/utils/file_baton.py)."""
    remove_stale_locks()
    assert not (locks / "old" / "lock").exists() and "old" in capsys.readouterr().out
    assert (locks / "young" / "lock").exists(), "it is younger than this process"


def test_who_made_the_lock_holds_it(locks):
    """As torch makes it: the file stays open until it is removed."""
    baton = FileBaton(str(locks / "made"))
    assert baton.try_acquire()
    os.utime(locks / "made", (1.0, 1.0))
    (locks / "made").rename(locks / "old" / "lock")
    assert stale_locks(locks) == []
    os.close(baton.fd)
    assert stale_locks(locks) == [locks / "old" / "lock"]


WAITING = """
import threading
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from zero_recipes.distributed import kernels

class Waits:
    def load(self, verbose):
        threading.Event().wait()

kernels.SAY_SECONDS, kernels.COMPILE_SECONDS = 0.05, 1.0
ALL_OPS["some_op"] = Waits()
kernels.build(["some_op"])
"""


def test_a_compilation_prints_that_it_goes_on_and_has_an_end(tmp_path):
    """The main thread may wait in torch for a lock, where no exception reaches it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WAITING]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "[ZR626]" in ended.stderr and f"{tmp_path}/some_op/lock" in ended.stderr
    assert "compiling some_op, once" in ended.stdout and "still compiling some_op" in ended.stdout
    assert "compiled" not in ended.stdout


def test_more_processes_than_gpus_are_refused(monkeypatch):
    four = SimpleNamespace(world_size=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=r"4 processes .* 2 GPUs .ZR309"):
        refuse_uneven_gpus(four, "cuda", {})
    refuse_uneven_gpus(four, "cuda", {"LOCAL_WORLD_SIZE": "2"})  # two machines
    refuse_uneven_gpus(four, "cpu", {})


def test_one_plain_process_with_several_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=r"2 GPUs .*ZR308"):
        refuse_uneven_gpus(SimpleNamespace(world_size=1), "cuda", {})
    refuse_uneven_gpus(SimpleNamespace(world_size=1), "cuda", {"RANK": "0"})
