"""A script as processes without a launcher between them and the test, and what a launcher sets for such processes."""

import atexit
import ctypes
import os
import runpy
import subprocess
import sys
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.helpers.group import ENVIRONMENT, SERVER, free_port, start_server
from tests.helpers.tiny import ROOT
from tests.helpers.worker import enter
from zero_recipes.core.run_end import REFUSAL_FILE
from zero_recipes.metrics.failure import REFUSAL

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def two_ranks(
    argv: list[str], folder: Path, extra: dict[str, str] | None = None, script: str = "run_sft.py"
) -> list[subprocess.CompletedProcess]:
    """How the script has ended on each of two ranks; what they print goes through `folder`."""
    return ranks(script, {0: argv, 1: argv}, 2, folder, {0: extra or {}, 1: extra or {}})


def ranks(
    script: str, argvs: dict[int, list[str]], world_size: int, folder: Path, extra: dict[int, dict[str, str]]
) -> list[subprocess.CompletedProcess]:
    """The same of any of `world_size` ranks, each with its own arguments and `extra` environment."""
    started = start(script, argvs, world_size, folder, extra)
    ended = []
    for rank, process in started.items():
        process.join(240)
        assert process.exitcode is not None, "it hangs"
        texts = [path.read_text() for path in written_by(rank, folder)]
        ended.append(subprocess.CompletedProcess([script, *argvs[rank]], process.exitcode, *texts))
    return ended


def start(
    script: str, argvs: dict[int, list[str]], world_size: int, folder: Path, extra: dict[int, dict[str, str]]
) -> dict[int, BaseProcess]:
    """The processes, by rank."""
    start_server()
    usual = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    usual["MASTER_PORT"] = str(free_port())
    started = {}
    for rank, argv in argvs.items():
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(folder / f"error{rank}.json")}
        written = written_by(rank, folder)
        for path in written:
            path.unlink(missing_ok=True)  # of an earlier call
        environment = os.environ | ENVIRONMENT | usual | own | extra.get(rank, {})
        started[rank] = SERVER.Process(target=_run, args=(script, argv, environment, *written))
        started[rank].start()
    return started


def written_by(rank: int, folder: Path) -> list[Path]:
    """What a rank prints: to stdout, to stderr."""
    return [folder / f"{stream}{rank}.txt" for stream in ("stdout", "stderr")]


def run_forked(command: list[str], folder: Path, *_) -> tuple[int, str]:
    """In place of `sweep.run_logged`: what `accelerate launch` would start, without importing the libraries anew.

    As a launcher does, it ends all ranks once one has failed. A process of a launch costs ten seconds of a core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    printed = folder.with_name(f"{folder.name}-printed")
    printed.mkdir(exist_ok=True)
    place = next(i for i, word in enumerate(command) if word.endswith(".py"))
    options = command[command.index("accelerate.commands.launch") + 1 : place]
    environment = {name: text for name, text in environment_by_launch(options).items() if name not in RANKS}
    environment[REFUSAL_FILE] = str((folder / REFUSAL).resolve())
    world_size = int(options[options.index("--num_processes") + 1])
    every = range(world_size)
    argvs = dict.fromkeys(every, command[place + 1 :])
    started = start(command[place], argvs, world_size, printed, dict.fromkeys(every, environment))
    running = list(started.values())
    while running:
        ended = connection.wait([process.sentinel for process in running], timeout=240)
        assert ended, "it hangs"
        running = [process for process in running if process.sentinel not in ended]
        if any(process.exitcode for process in started.values()):
            for process in running:
                process.kill()
    log = "".join(path.read_text() for rank in every for path in written_by(rank, printed))
    (folder / "log.txt").write_text(log)
    return int(any(process.exitcode for process in started.values())), log


def _run(script: str, argv: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    enter(out, err, environment)
    if "NETWORK" in environment:
        enter_network(environment["NETWORK"])
    sys.argv = [script, *argv]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's end; a forked process has none


def enter_network(name: str) -> None:
    """The network namespace of this name, which `ip netns add` has made. Python has os.setns from 3.12 on."""
    with open(f"/var/run/netns/{name}") as namespace:
        failed = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0)
    assert not failed, os.strerror(ctypes.get_errno())


def start_tool(argv: list[str], folder: Path) -> BaseProcess:
    """`zero-recipes ARGV` from this folder, in a process that can be stopped."""
    start_server()
    process = SERVER.Process(target=_run_tool, args=(argv, folder, dict(os.environ)))
    process.start()
    return process


def _run_tool(argv: list[str], folder: Path, environment: dict[str, str]) -> None:
    from zero_recipes.tools.main import main

    enter(folder / "stdout.txt", folder / "stderr.txt", environment | {"PYTHONPATH": str(ROOT)})
    os.chdir(folder)
    sys.exit(main(argv))


def environment_of_launch(path: Path, num_processes: int | None) -> dict[str, str]:
    """The environment that it gives to what it starts, without ranks. Raises whatever accelerate raises."""
    options = ["--config_file", str(path), *(["--num_processes", str(num_processes)] if num_processes else [])]
    return environment_by_launch([*options, "--main_process_port", "0"])


def environment_by_launch(options: list[str]) -> dict[str, str]:
    """The same of any options of `accelerate launch`."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepared

    args = launch.launch_command_parser().parse_args([*options, "run_sft.py"])
    args, defaults, from_file = launch._validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return prepared.prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return prepared.prepare_multi_gpu_env(args)
    return prepared.prepare_simple_launcher_cmd_env(args)[1]


def set_by_launch(path: Path, num_processes: int | None) -> dict[str, str]:
    """What `accelerate launch --config_file path` sets for the processes that it starts, but where they meet."""
    environment = environment_of_launch(path, num_processes).items()
    left_out = ("PYTHON", "KMP", "OMP", "MASTER")
    return {name: text for name, text in environment if os.environ.get(name) != text and not name.startswith(left_out)}
