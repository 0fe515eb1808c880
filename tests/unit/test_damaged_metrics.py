"""Damaged and foreign metrics.json: a row that says why, or one refusal; never a traceback."""

from __future__ import annotations

from contextlib import chdir

import pytest

from zero_recipes.checkpoint.output_dir import refuse_occupied
from zero_recipes.cli.sweep import _row
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.read_runs import read_run


def test_a_sweep_goes_on_where_a_run_left_damaged_files(tmp_path):
    (tmp_path / "failure.rank0.json").write_bytes(b"\xff{")
    row = _row(tmp_path, "zero1", 1, "it broke")
    assert row.status == "failed" and row.error.startswith("exit code 1; ")
    with chdir(tmp_path):
        assert read_run(tmp_path / "metrics.json").status == "failed"


@pytest.mark.parametrize("text", ["{", "[]", "7", "null", '{"status": []}', "\x00"])
def test_a_folder_with_a_damaged_one_is_occupied(tmp_path, text):
    """What cannot be read may be a finished run's: it is kept, with a refusal and no traceback."""
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(Refusal, match="ZR702"):
        refuse_occupied(tmp_path, None, overwrite=False)
