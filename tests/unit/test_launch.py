"""Before the process group: stale build locks go, live ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_recipes.config.run import refuse_data_parallel, refuse_shared_gpus
from zero_recipes.core.errors import Refusal
from zero_recipes.distributed.kernels import remove_stale_build_locks

ROOT = Path(__file__).resolve().parents[2]


def test_a_stale_build_lock_is_removed_and_a_live_one_stays(tmp_path, monkeypatch, capsys):
    """A stale lock hangs every later launch silently (torch/utils/file_baton.py)."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    for name, age in (("stale", 1.0), ("live", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        if age is not None:
            os.utime(tmp_path / name / "lock", (age, age))
    compiler = SimpleNamespace(info={"name": "cc1plus"})
    monkeypatch.setattr("psutil.process_iter", lambda attributes: [compiler])
    remove_stale_build_locks()
    assert (tmp_path / "stale" / "lock").exists(), "a compiler at work may hold it"
    monkeypatch.setattr("psutil.process_iter", lambda attributes: [])
    monkeypatch.setenv("RANK", "1")
    remove_stale_build_locks()
    assert (tmp_path / "stale" / "lock").exists(), "only rank 0 removes"
    monkeypatch.setenv("RANK", "0")
    remove_stale_build_locks()
    assert not (tmp_path / "stale" / "lock").exists()
    assert (tmp_path / "live" / "lock").exists()
    assert "stale" in capsys.readouterr().out


def test_more_processes_than_gpus_are_refused(monkeypatch):
    four = SimpleNamespace(world_size=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match="4 processes on this machine, but 2 GPUs"):
        refuse_shared_gpus(four, "cuda", {})
    refuse_shared_gpus(four, "cuda", {"LOCAL_WORLD_SIZE": "2"})  # two machines
    refuse_shared_gpus(four, "cpu", {})


def test_one_plain_process_with_several_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match="2 GPUs are visible"):
        refuse_data_parallel(SimpleNamespace(world_size=1), "cuda", {})
    refuse_data_parallel(SimpleNamespace(world_size=1), "cuda", {"RANK": "0"})


SPEAKING = """
import os, sys
from zero_recipes.core.errors import Refusal, print_refusal

if os.environ["RANK"] == "0":
    sys.stdin.read()  # slower than rank 1, until the test lets go
code = print_refusal(Refusal("ZR000", "what", "why", "fix"))
print("left", flush=True)
sys.exit(code)
"""


def test_a_silent_rank_leaves_after_rank_0_has_spoken():
    """A launcher ends all ranks when the first ends: were it a silent one, nobody would hear why."""
    ranks = []
    for rank in ("0", "1"):
        environment = os.environ | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen([sys.executable, "-c", SPEAKING], env=environment, text=True, **pipes))
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(2)
    assert "refused: what" in ranks[0].communicate(timeout=60)[1]
    out, err = ranks[1].communicate(timeout=60)
    assert (out, err, ranks[0].returncode, ranks[1].returncode) == ("left\n", "", 2, 2)
