"""Every fault is found, by its code, and its fixed twin passes: alone, on two ranks, launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.bad_recipes import FAULTS, findings_of
from zero_recipes.config.accelerate import launched_environment

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ERRORS = [fault for fault in FAULTS if fault.level == "error"]
LAUNCHED = ("a misspelt key", "another global batch", "rows cut before their answers")


def test_there_are_forty_and_their_names_differ():
    assert len(ERRORS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_found_and_its_fixed_twin_passes(fault, tmp_path):
    found = findings_of(fault.bad, tmp_path / "bad")
    assert {finding.code for finding in found if finding.level == fault.level} == {fault.code}
    assert any(fault.names in finding.what for finding in found if finding.code == fault.code), found
    assert all(finding.why and finding.fix for finding in found)
    assert findings_of(fault.fixed, tmp_path / "fixed") == [], "the twin differs only in the fault"


def test_a_job_of_two_ranks_refuses_every_fault_on_both(two, tmp_path):
    """One job, one run after another: each ends refused, with the same words on both ranks, and leaves no output."""
    faults = [fault for fault in ERRORS if not fault.launcher_stops]
    runs = []
    for number, fault in enumerate(faults):
        folder = tmp_path / str(number)
        argv = fault.bad.write(folder)
        file = None if fault.bad.accelerate is None else folder / "accelerate.yaml"
        runs.append({"folder": str(folder), "argv": argv, "environment": launched_environment(file, 2)})
    ranks = two.run("refusals_in", runs=runs)
    assert ranks[0] == ranks[1] and len(ranks[0]) == len(faults)
    for number, (fault, refused) in enumerate(zip(faults, ranks[0], strict=True)):
        assert f"[{fault.code}]" in refused and fault.names in refused, (fault.name, refused)
        assert [path.name for path in (tmp_path / str(number) / "out").rglob("*")] == [
            Path(name).name for name in fault.bad.files if name.startswith("out/")
        ], fault.name


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_real_launcher_ends_with_the_message(name, tmp_path):
    (fault,) = (fault for fault in ERRORS if fault.name == name)
    recipe, *overrides = fault.bad.write(tmp_path)
    command = [BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    ended = subprocess.run(
        [*map(str, command), str(ROOT / "run_sft.py"), recipe, *overrides],
        cwd=tmp_path,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1, "accelerate makes 1 of every code"
    assert ended.stderr.count("refused: ") >= 1 and f"[{fault.code}]" in ended.stderr and fault.names in ended.stderr
    assert "   fix: " in ended.stderr.rstrip()[-1500:], "the message stands in the closing table"
    assert "Loading weights" not in ended.stderr and not (tmp_path / "out").exists()
