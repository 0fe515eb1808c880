"""run_sft.py as two processes without a launcher between them and the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny import ROOT
from zero_recipes.core.process import free_port


def two_ranks(
    argv: list[str], tmp_path: Path, extra: dict[str, str] | None = None, by_rank: dict[int, dict] | None = None
) -> list[subprocess.CompletedProcess]:
    port = free_port()
    running = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error{rank}.json"),
            **(extra or {}),
            **(by_rank or {}).get(rank, {}),
        }
        running.append(
            subprocess.Popen(
                [sys.executable, "run_sft.py", *argv],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        )
    ended = [(process, *process.communicate(timeout=240)) for process in running]
    return [subprocess.CompletedProcess(process.args, process.returncode, out, err) for process, out, err in ended]
