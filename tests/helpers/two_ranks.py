"""A script as processes without a launcher between them and the test, and what a launcher sets for such processes."""

import atexit
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.helpers.group import ENVIRONMENT, SERVER, free_port, start_server
from tests.helpers.tiny import ROOT
from tests.helpers.worker import enter


def two_ranks(
    argv: list[str], folder: Path, extra: dict[str, str] | None = None, script: str = "run_sft.py"
) -> list[subprocess.CompletedProcess]:
    """How the script has ended on each of two ranks; what they print goes through `folder`."""
    return ranks(script, {0: argv, 1: argv}, 2, folder, {0: extra or {}, 1: extra or {}})


def ranks(
    script: str, argvs: dict[int, list[str]], world_size: int, folder: Path, extra: dict[int, dict[str, str]]
) -> list[subprocess.CompletedProcess]:
    """The same of any of `world_size` ranks, each with its own arguments and `extra` environment."""
    start_server()
    usual = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    usual |= {"MASTER_PORT": str(free_port())}
    running = []
    for rank, argv in argvs.items():
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(folder / f"error{rank}.json")}
        written = [folder / f"{stream}{rank}.txt" for stream in ("stdout", "stderr")]
        for path in written:
            path.unlink(missing_ok=True)  # of an earlier call
        environment = os.environ | ENVIRONMENT | usual | own | extra.get(rank, {})
        running.append((SERVER.Process(target=_run, args=(script, argv, environment, *written)), written))
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


def environment_of_launch(path: Path, num_processes: int | None) -> dict[str, str]:
    """The environment that it gives to what it starts, without ranks. Raises whatever accelerate raises."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepared

    options = ["--config_file", str(path), *(["--num_processes", str(num_processes)] if num_processes else [])]
    args = launch.launch_command_parser().parse_args([*options, "--main_process_port", "0", "run_sft.py"])
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
