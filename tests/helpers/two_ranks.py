"""A script as processes without a launcher between them and the test, forked with the libraries imported."""

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
    argv: list[str], folder: Path, extra: dict[str, str] | None = None, script: str = "run_sft.py"
) -> list[subprocess.CompletedProcess]:
    """How the script has ended on each rank; what they print goes through `folder`."""
    start_server()
    usual = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = []
    for rank in range(2):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | usual
        environment["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}.json")
        written = [folder / f"{stream}{rank}.txt" for stream in ("stdout", "stderr")]
        arguments = (script, argv, os.environ | ENVIRONMENT | environment | (extra or {}), *written)
        running.append((SERVER.Process(target=_run, args=arguments), written))
        running[-1][0].start()
    ended = []
    for process, written in running:
        process.join(240)
        assert process.exitcode is not None, "it hangs"
        texts = [path.read_text() for path in written]
        ended.append(subprocess.CompletedProcess([script, *argv], process.exitcode, *texts))
    return ended


def _run(script: str, argv: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    enter(out, err, environment)
    sys.argv = [script, *argv]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's end; a forked process has none
