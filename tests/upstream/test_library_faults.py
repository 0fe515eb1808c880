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
