"""A launched group of processes that stays up: imports and process group once, then one case after another.

A launch of its own costs 12 s and more on two cores, a further run in the same processes 3 to 6 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zero_recipes.core.process import free_port

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 300  # a guard only: a hanging case is killed, and all its ranks say where they stood


class CaseFailed(AssertionError):
    """A case raised on at least one rank; the message holds every rank's traceback."""


class Group:
    """`world_size` processes of tests/helpers/worker.py on this machine's CPU, joined by gloo."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix=f"group{world_size}-"))
        port = free_port()
        self.workers = []
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": str(ROOT),
            }
            log = open(self.folder / f"rank{rank}.log", "w")  # noqa: SIM115 (lives as long as the worker)
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "tests" / "helpers" / "worker.py"), str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=ROOT,
                    env=environment,
                )
            )
        self.cases = 0

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """Run `tests.helpers.cases.<case>(**arguments)` on every rank; the results, by rank. All of it is JSON.

        A case of another file is named with it: "reshard_cases.train_and_keep_states".
        """
        self.cases += 1
        for worker in self.workers:
            worker.stdin.write(json.dumps({"number": self.cases, "case": case, "arguments": arguments}) + "\n")
            worker.stdin.flush()
        return [self._result(rank, case) for rank in range(self.world_size)]

    def _result(self, rank: int, case: str) -> Any:
        path = self.folder / f"case{self.cases}.rank{rank}.json"
        _wait_for(path, self.workers[rank])
        if not path.is_file():
            state = self.workers[rank].poll()
            self.close()
            raise CaseFailed(
                f"{case}: rank {rank} {'hangs' if state is None else f'ended with {state}'}\n{self.log(rank)}"
            )
        result = json.loads(path.read_text())
        if "traceback" in result:
            raise CaseFailed(f"{case} on rank {rank}:\n{result['traceback']}")
        return result["value"]

    def log(self, rank: int, last: int = 3000) -> str:
        return (self.folder / f"rank{rank}.log").read_text()[-last:]

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()


def _wait_for(path: Path, worker: subprocess.Popen) -> None:
    """Until the file is there, the worker has ended, or the guard's time is over."""
    import threading

    pulse = threading.Event()
    for _ in range(HANG_SECONDS * 20):
        if path.is_file() or worker.poll() is not None:
            return
        pulse.wait(0.05)
