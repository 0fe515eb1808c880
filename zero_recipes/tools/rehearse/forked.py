"""Launches whose ranks are forks of a process that has imported the libraries, server.py: they cost no imports."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from zero_recipes.core.process import kill_with_children
from zero_recipes.tools import sweep

SERVER = Path(__file__).with_name("server.py")
# torch asks the driver's library for GPUs, and begins no CUDA, which a fork could not begin again (docs/source/notes/
# multiprocessing.rst "Poison fork in multiprocessing"). Of the server alone
WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
SAID = b"forked from a process that has imported the libraries, as this launch would start it\n"


class ForkServer:
    """The server's process, from its start to its end. It imports while other things go on."""

    def __init__(self, words: list[str], environment: Mapping[str, str]):
        """`words`: of a run's command line, with the script. `environment`: of its rank 0."""
        self.channel, servers = socket.socketpair()
        self.answers = self.channel.makefile()
        self.is_ready: bool | None = None  # not known before its first launch
        # what an import prints, the real launch has shown. Pipes as a launch's: Python asks of a file where it stands.
        # One that is full raises, and the server ends: nothing waits for a reader
        self.unread, printed = os.pipe()
        os.set_blocking(printed, False)
        with servers, open(printed, "wb") as nobody:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), str(servers.fileno()), *words],
                env={**environment, **WITHOUT_CUDA},
                pass_fds=[servers.fileno()],
                start_new_session=True,
                stdout=nobody,
                stderr=nobody,
            )

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            kill_with_children(psutil.Process(self.process.pid))
            self.process.wait()
        self.answers.close()
        self.channel.close()
        os.close(self.unread)

    def start(
        self,
        words: list[str],
        environments: list[dict[str, str]],
        command: list[str],
        environment: Mapping[str, str],
    ) -> "ForkedLaunch | subprocess.Popen":
        """Fork the ranks of a launch, or start it as `sweep.started` does where the server cannot fork.

        `environments`: of each rank.
        """
        if self.is_ready is None:
            self.is_ready = self.answers.readline() != ""
        if not self.is_ready:
            return sweep.started(command, environment)
        ours, theirs = os.pipe()
        os.write(theirs, SAID)
        order = {"argv": words, "environments": environments}
        socket.send_fds(self.channel, [b"\0"], [theirs])
        self.channel.sendall(f"{json.dumps(order)}\n".encode())
        os.close(theirs)
        return ForkedLaunch(self, ours)

    def kill_ranks(self) -> None:
        """Kill all ranks at once with SIGKILL: none may notice that another has ended, and say so."""
        ranks = psutil.Process(self.process.pid).children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.suspend()
        for rank in ranks:
            kill_with_children(rank)


class ForkedLaunch:
    """What `sweep.run_logged` needs of a subprocess.Popen."""

    def __init__(self, server: ForkServer, output: int):
        self.server = server
        self.pid = server.process.pid
        self.stdout = os.fdopen(output, errors="replace")
        self.exit_code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.exit_code

    def wait(self) -> int:
        """Wait for the end. Returns the exit code as `accelerate launch` has it: 1 for a rank's.

        That of a signal is negative. If the server was killed, it is the server's.
        """
        self.stdout.close()
        answer = self.server.answers.readline()
        code = int(answer) if answer else self.server.process.wait()
        self.exit_code = min(code, 1)
        return self.exit_code
