"""A process that imports what a run imports, once, and forks the ranks of one launch after another.

server.py SOCKET RUN_SFT.PY RECIPE.yaml [--key value ...], which forked.py starts. It is no module of the package that a
rank would import: what follows in a fork is `python RUN_SFT.PY`, from its first line to the interpreter's end.

One thing is alike in all forks, Python's hash seed: only launches as they are show a set's order that differs between
ranks, or between a run and its resume.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

# as `python RUN_SFT.PY` has it, links resolved; here it would be this file's folder
sys.path[0] = str(Path(sys.argv[2]).resolve().parent)

from zero_recipes.config.command_line import split_command_line  # noqa: E402
from zero_recipes.config.read import parse_recipe  # noqa: E402
from zero_recipes.config.recipe import recipe_in_force  # noqa: E402
from zero_recipes.core.process import RANK_0, end_with_parent, kill_with_children  # noqa: E402
from zero_recipes.engine.warnings import quiet_imports  # noqa: E402

IMPORTED = ("zero_recipes.training.inputs", "zero_recipes.training.session", "zero_recipes.training.trainer")
STOP_SECONDS = 30.0  # for ranks to end once another has failed, as torchrun's
READY = b"ready\n"


def serve(client: socket.socket) -> list[str] | None:
    """Fork the ranks of each launch that the client orders, and answer with the exit code of the first that failed, or
    0. Returns sys.argv in each rank, and None here, once the client has ended."""
    client.sendall(READY)
    while True:
        order, output = received(client)
        if order is None:
            return None
        ranks: list[int] = []
        for environment in order["environments"]:
            if ranks:
                environment[RANK_0] = str(ranks[0])
            rank = os.fork()
            if rank == 0:
                client.close()
                become_rank(environment, output)
                return order["argv"]
            ranks.append(rank)
        code = wait_for(ranks, output)
        os.close(output)  # the client reads up to the end
        client.sendall(f"{code}\n".encode())


def received(client: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """Read an order, and where its ranks print. It is a line, after a byte with the file."""
    _, files, _, _ = socket.recv_fds(client, 1, 1)
    if not files:
        return None, -1
    with client.makefile() as lines:
        return json.loads(lines.readline()), files[0]


def become_rank(environment: dict[str, str], output: int) -> None:
    """What a process of its own would have: its environment, where it prints, and random numbers (Python sees to its
    own). A run that forgets a seed shall differ from another."""
    import numpy
    import torch

    end_with_parent()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    numpy.random.seed()
    torch.default_generator.seed()


def wait_for(ranks: list[int], output: int) -> int:
    """Wait for the ranks as a launcher does: once one has failed, it ends the others.

    Returns the failed one's exit code, negative for a signal; else 0.
    """
    running = {pid: rank for rank, pid in enumerate(ranks)}
    while running:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        rank = running.pop(pid, None)  # None: what a library has started
        if code and rank is not None:
            os.write(output, f"rank {rank} ended with exit code {code}\n".encode())
            stop([psutil.Process(other) for other in running])
            return code
    return 0


def stop(processes: list[psutil.Process]) -> None:
    """End processes, with SIGKILL where SIGTERM does not do."""
    for process in processes:
        process.terminate()
    _, left = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    for process in left:
        kill_with_children(process)
        process.wait()


def import_libraries(argv: list[str]) -> str:
    """Import what a run imports, in its own order, for what it sets before. Returns "cpu" or "cuda"."""
    path, overrides = split_command_line(argv)
    mapping = recipe_in_force(path)  # sets the recipe's `env:`
    with quiet_imports():
        from zero_recipes.config.run import choose_device

        settings = parse_recipe(path, mapping, overrides).settings
        device = choose_device(settings.use_cpu)  # sets what DeepSpeed, imported next, goes by
        for name in IMPORTED:
            importlib.import_module(name)
    return device


def can_fork(device: str) -> bool:
    """Whether this process can fork: not with threads, which a fork has not, and not where CUDA was begun.

    No fork can begin CUDA again.
    """
    if threading.active_count() > 1:
        return False
    if device == "cpu":
        return True
    import torch

    tried = os.fork()
    if tried == 0:
        try:
            torch.cuda.init()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(tried, 0)[1] == 0


if __name__ == "__main__":
    end_with_parent()
    argv = None
    channel = socket.socket(fileno=int(sys.argv[1]))
    if can_fork(import_libraries(sys.argv[3:])):
        argv = serve(channel)
    if argv is not None:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
