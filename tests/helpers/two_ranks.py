"""run_sft.py as two processes without a launcher between them and the test, forked with the libraries imported."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.helpers.group import ENVIRONMENT, SERVER, start_server
from tests.helpers.tiny import ROOT
from tests.helpers.worker import enter
from zero_recipes.core.process import free_port


def two_ranks(
    argv: list[str], tmp_path: Path, extra: dict[str, str] | None = None, by_rank: dict[int, dict] | None = None
) -> list[subprocess.CompletedProcess]:
    start_server()
    port = free_port()
    running = []
    for rank in range(2):
        environment = os.environ | ENVIRONMENT
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error{rank}.json"),
            **(extra or {}),
            **(by_rank or {}).get(rank, {}),
        }
        written = [tmp_path / f"{stream}{rank}.txt" for stream in ("out", "err")]
        running.append((SERVER.Process(target=_run, args=(argv, environment, *written)), written))
        running[-1][0].start()
    ended = []
    for process, written in running:
        process.join(240)
        assert process.exitcode is not None, "it hangs"
        ended.append(subprocess.CompletedProcess(argv, process.exitcode, *(path.read_text() for path in written)))
    return ended


def _run(argv: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    enter(out, err, environment)
    sys.argv = ["run_sft.py", *argv]
    try:
        runpy.run_path(str(ROOT / "run_sft.py"), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's end; a forked process has none
