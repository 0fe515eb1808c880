"""The programs of docs/library_faults.md: with the libraries as they are, each shows that its fault is still there."""

import pytest

from scripts.library_faults import Fault, read_faults
from tests.helpers.two_ranks import ranks

PROCESSES = {
    "any machine": 1,
    "one CPU": 1,
    "one CPU, without CUDA": 1,
    "one CPU, a C++ compiler": 1,
    "two processes on CPUs": 2,
}
FAULTS = [fault for fault in read_faults("faults") if fault.needs in PROCESSES]


@pytest.mark.private
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_fault_is_still_there(fault: Fault, tmp_path):
    program = tmp_path / "see_it.py"
    program.write_text(fault.program)
    count = PROCESSES[fault.needs]
    ended = ranks(str(program), {rank: [] for rank in range(count)}, count, tmp_path, {})
    for process in ended:
        assert process.returncode == 0, f"faults/{fault.name}.py may go: {process.stderr[-2000:]}"


PATCHES = {  # fault: the call of its patch
    "adapters_rounded_at_stage_3": "apply()",
    "fp32_parameters": "apply()",
    "fsdp_head_of_an_adapter": "apply()",
    "group_timeouts": "apply(4321)",
    "json_texts": "apply()",
    "new_tokens_need_cuda": "apply()",
    "stale_releases": "apply()",
}


@pytest.mark.parametrize("name", PATCHES)
def test_the_patch_takes_the_fault_away(name, tmp_path):
    fault = next(fault for fault in FAULTS if fault.name == name)
    program = tmp_path / "see_it.py"
    patch = f"from zero_recipes.engine.faults import {name}\n\n{name}.{PATCHES[name]}\n"
    program.write_text(patch + fault.program)
    (ended,) = ranks(str(program), {0: []}, 1, tmp_path, {})
    assert ended.returncode == 1
    assert "AssertionError" in ended.stderr or "no fault" in ended.stderr, ended.stderr[-2000:]
