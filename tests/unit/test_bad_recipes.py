"""Every fault is found, by its code, and its fixed twin passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.bad_recipes import FAULTS, findings_of

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SOUND: set[str] = set()  # twins without a finding
ERRORS = [fault for fault in FAULTS if fault.level == "error"]


def test_there_are_forty_and_their_names_differ():
    assert len(ERRORS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_found_and_its_fixed_twin_passes(fault, tmp_path):
    found = findings_of(fault.bad, tmp_path / "bad")
    assert {finding.code for finding in found if finding.level == fault.level} == {fault.code}
    assert any(fault.names in finding.what for finding in found if finding.code == fault.code), found
    assert all(finding.why and finding.fix for finding in found)
    if repr(fault.fixed) not in SOUND:  # many faults have the same twin
        assert findings_of(fault.fixed, tmp_path / "fixed") == [], "the twin differs only in the fault"
        SOUND.add(repr(fault.fixed))
