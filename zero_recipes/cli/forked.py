"""A launch without its imports: the ranks of a run are forked from one process that has imported the libraries."""

import logging
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from rich.console import Console

from zero_recipes.config.accelerate import launched_environment
from zero_recipes.core.process import end_with_parent
from zero_recipes.core.tables import working

# a process cannot use CUDA where the one that it is forked from has begun to: torch counts cards by NVML without that
COUNTED_BY_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
AGENTS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


def forked(command: list[str], folder: Path, label: str, console: Console, threads: int) -> tuple[int, str]:
    """(exit code, the log's last 400 lines) of one machine's launch by accelerate, `sweep.launch_of_strategy`'s. The
    whole log goes to folder/log.txt."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    args = launch_command_parser().parse_args(command[command.index("--config_file") :])
    environment = os.environ | launched_environment(Path(args.config_file), args.num_processes)
    folder.mkdir(parents=True, exist_ok=True)
    log, exit_code = folder / "log.txt", 0
    log.write_text(" ".join(command) + "\n")
    os.environ.update({"OMP_NUM_THREADS": str(threads)} | os.environ | COUNTED_BY_NVML)  # from the server's start on
    multiprocessing.get_context("forkserver").set_forkserver_preload(["zero_recipes.cli.preload"])
    # as accelerate, which starts torchrun's agent
    ranks, rendezvous = int(environment["WORLD_SIZE"]), {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    agent = LaunchConfig(1, 1, ranks, run_id=folder.name, max_restarts=0, start_method="forkserver", **rendezvous)
    for name in AGENTS:  # the log says it, and the row
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with working(label, console):
        try:
            elastic_launch(agent, _rank)([args.training_script, *args.training_script_args], environment, log)
        except ChildFailedError as error:
            exit_code = 1
            with open(log, "a") as file:  # each rank's code; why it ended, where rank 0 could not say it
                file.write(str(error))
        except SignalException as error:
            sys.exit(128 + error.sigval)
    return exit_code, "\n".join(log.read_text(errors="replace").splitlines()[-400:])


def _rank(words: list[str], environment: dict[str, str], log: Path) -> None:
    end_with_parent()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
