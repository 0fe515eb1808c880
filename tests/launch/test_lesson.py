"""The notebook of the docs runs, cell after cell."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.tiny import ROOT


@pytest.mark.grid
def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "docs" / "lesson.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "lesson.py").write_text("\n\n".join(code))
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(tmp_path / "lesson.py")], cwd=ROOT, env=environment, check=True)
