"""A group of processes that stays up: imports and process group once, then one case after another.

A launch of its own costs 6 s and more on two cores, a further run in the same processes half a second. The libraries
are imported by one server for all groups (tests/helpers/preloaded.py), from which each rank is forked.
"""

import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers import worker

ROOT = Path(__file__).resolve().parents[2]
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "tests.helpers.preloaded"])
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
HANG_SECONDS = 300  # a guard only: a hanging case is killed, and the message holds the rank's log


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CaseFailed(AssertionError):
    """A case raised on at least one rank; the message holds that rank's traceback."""


class Group:
    """`world_size` processes of tests/helpers/worker.py on this machine's CPU, joined by gloo.

    They start with the first case, and anew with the next one after a rank has ended or hung.
    """

    def __init__(self, world_size: int, hang_seconds: float = HANG_SECONDS):
        self.world_size = world_size
        self.hang_seconds = hang_seconds
        self.folder = Path(tempfile.mkdtemp(prefix=f"group{world_size}-"))
        self.processes: list = []
        self.cases = 0

    def start(self) -> None:
        start_server()
        port, environment = free_port(), os.environ | ENVIRONMENT
        self.ranks = []
        for rank in range(self.world_size):
            ours, theirs = SERVER.Pipe()
            arguments = (rank, self.world_size, port, self.folder / f"rank{rank}.log", environment, theirs)
            process = SERVER.Process(target=worker.be_rank, args=arguments)
            process.start()
            theirs.close()
            self.ranks.append(ours)
            self.processes.append(process)

    def run(self, case: Callable, **arguments: Any) -> list[Any]:
        """Run `case(**arguments)` on every rank; the results, by rank. Arguments and results are JSON.

        `case`: a function of a module, which the ranks import by its name.
        """
        name = f"{case.__module__}:{case.__qualname__}"
        if not self.processes:
            self.start()
        self.cases += 1
        for rank in self.ranks:
            with suppress(BrokenPipeError):  # it has ended: `_result` says so
                rank.send(json.dumps({"number": self.cases, "case": name, "arguments": arguments}))
        return [self._result(rank, name) for rank in range(self.world_size)]

    def _result(self, rank: int, case: str) -> Any:
        number = 0
        while number < self.cases:  # an earlier case that failed on a lower rank: nobody has read this rank's answer
            try:
                answer = self.ranks[rank].recv() if self.ranks[rank].poll(self.hang_seconds) else None
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
        path = self.folder / f"rank{rank}.log"
        return path.read_text()[-last:] if path.is_file() else ""

    def close(self) -> None:
        """Let the ranks end after their last case."""
        if not self.processes:
            return
        for rank in self.ranks:
            rank.close()
        for process in self.processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.join()
        for rank in self.ranks if self.processes else ():
            rank.close()
        self.processes = []


def start_server() -> None:
    """The server is forked from pytest's own process: after collection that has most of the libraries at hand."""
    resource_tracker.ensure_running()  # `forkserver` would start it, and its file would be taken for the server's
    before = _open_files()

    def fork(_program: str, words: list[str], passed: list[int]) -> int:
        server = os.fork()
        if server == 0:
            for file in _open_files() - before - set(passed):
                with suppress(OSError):  # what listed the folder is closed
                    os.close(file)  # an end of the pipe by which the server learns that pytest has ended
            try:
                exec(words[-1])
            finally:
                os._exit(0)
        return server

    environment = patch.dict(os.environ, ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    with environment, patch("multiprocessing.util.spawnv_passfds", fork):
        forkserver.ensure_running()


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}
