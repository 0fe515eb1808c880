"""Before the process group: stale build locks go, live ones stay."""

from __future__ import annotations

import os
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
    with pytest.raises(Refusal, match=r"4 processes .* 2 GPUs .ZR309"):
        refuse_shared_gpus(four, "cuda", {})
    refuse_shared_gpus(four, "cuda", {"LOCAL_WORLD_SIZE": "2"})  # two machines
    refuse_shared_gpus(four, "cpu", {})


def test_one_plain_process_with_several_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=r"2 GPUs .*ZR308"):
        refuse_data_parallel(SimpleNamespace(world_size=1), "cuda", {})
    refuse_data_parallel(SimpleNamespace(world_size=1), "cuda", {"RANK": "0"})
