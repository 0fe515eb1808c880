"""A group of processes that stays up: imports and process group once, then one case after another.

A launch of its own costs 6 s and more on two cores, a further run in the same processes half a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from zero_recipes.core.process import free_port

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 300  # a guard only: a hanging case is killed, and the message holds the rank's log


class CaseFailed(AssertionError):
    """A case raised on at least one rank; the message holds that rank's traceback."""


class Group:
    """`world_size` processes of tests/helpers/worker.py on this machine's CPU, joined by gloo.

    They start with the first case, and anew with the next one after a rank has ended or hung.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix=f"group{world_size}-"))
        self.process: subprocess.Popen | None = None
        self.cases = 0

    def start(self) -> None:
        self.ranks, theirs = zip(*(Pipe() for _ in range(self.world_size)), strict=True)
        descriptors = [connection.fileno() for connection in theirs]
        arguments = [self.world_size, free_port(), str(self.folder), descriptors]
        environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        with open(self.folder / "start.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "helpers" / "worker.py"), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | environment,
                pass_fds=descriptors,
                start_new_session=True,  # its ranks are killed with it
            )
        for connection in theirs:
            connection.close()

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """Run `tests.helpers.cases.<case>(**arguments)` on every rank; the results, by rank. All of it is JSON.

        A case of another file is named with it: "reshard_cases.train_and_keep_states".
        """
        if self.process is None:
            self.start()
        self.cases += 1
        for rank in self.ranks:
            with suppress(BrokenPipeError):  # it has ended: `_result` says so
                rank.send(json.dumps({"number": self.cases, "case": case, "arguments": arguments}))
        return [self._result(rank, case) for rank in range(self.world_size)]

    def _result(self, rank: int, case: str) -> Any:
        number = 0
        while number < self.cases:  # an earlier case that failed on a lower rank: nobody has read this rank's answer
            try:
                answer = self.ranks[rank].recv() if self.ranks[rank].poll(HANG_SECONDS) else None
                state = "hangs"
            except (EOFError, ConnectionResetError):
                answer, state = None, "has ended"
            if answer is None:
                self.kill()
                raise CaseFailed(f"{case}: rank {rank} {state}\n{self.log(rank)}")
            number, outcome = json.loads(answer)
        if "traceback" in outcome:
            raise CaseFailed(f"{case} on rank {rank}:\n{outcome['traceback']}")
        return outcome["value"]

    def log(self, rank: int, last: int = 3000) -> str:
        logs = (self.folder / "start.log", self.folder / f"rank{rank}.log")
        return "".join(path.read_text()[-last:] for path in logs if path.is_file())

    def close(self) -> None:
        """Let the ranks end after their last case."""
        if self.process is None:
            return
        for rank in self.ranks:
            rank.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for rank in self.ranks:
            rank.close()
        self.process = None
