"""The lesson's notebook is executed as a reader would; its own asserts hold what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.launch


def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    spec = tmp_path / "kernels" / "lesson"  # this interpreter, whatever kernels the machine has
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "lesson", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "docs" / "lesson.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "committed without outputs"
    resources = {"metadata": {"path": str(ROOT / "docs")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="lesson", resources=resources).execute()
    shown = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown), "the plot"
    said = "".join(output.get("text", "") for output in shown)
    assert "stage 2: 3.00Φ" in said and "stage 3: 2.00Φ" in said and "before:" in said
    print(said)
