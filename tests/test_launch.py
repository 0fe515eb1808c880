"""Before the process group: stale build locks go, live ones stay."""

from __future__ import annotations

import os

from zero_recipes.launch import remove_stale_build_locks


def test_a_stale_build_lock_is_removed_and_a_live_one_stays(tmp_path, monkeypatch, capsys):
    """A stale lock hangs every later launch silently (torch/utils/file_baton.py)."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    for name, age in (("stale", 1.0), ("live", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        if age is not None:
            os.utime(tmp_path / name / "lock", (age, age))
    monkeypatch.setenv("RANK", "1")
    remove_stale_build_locks()
    assert (tmp_path / "stale" / "lock").exists(), "only rank 0 removes"
    monkeypatch.setenv("RANK", "0")
    remove_stale_build_locks()
    assert not (tmp_path / "stale" / "lock").exists()
    assert (tmp_path / "live" / "lock").exists()
    assert "stale" in capsys.readouterr().out
