"""A launch without its imports: the ranks of a run are forked from one process that has imported the libraries."""

import logging
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

from rich.console import Console

from zero_recipes.config.accelerate import launched_environment
from zero_recipes.core.process import CLOCK, age, end_with_parent
from zero_recipes.core.tables import working
from zero_recipes.tools.plan.simulator.parent import OF_A_LAUNCHER

# a process cannot use CUDA where the one that it is forked from has begun to: torch counts cards by NVML without that
COUNTED_BY_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torchrun's agent, from its start on
AGENTS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


def forked(command: list[str], folder: Path, label: str, console: Console, threads: int) -> tuple[int, str]:
    """(exit code, the log's last 400 lines) of one machine's launch by accelerate, `sweep.launch_of_strategy`'s. The
    whole log goes to folder/log.txt."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    args = launch_command_parser().parse_args(command[command.index("--config_file") :])
    os.environ.update({"OMP_NUM_THREADS": str(threads)} | os.environ | COUNTED_BY_NVML)  # from the server's start on
    own = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_LAUNCHER)}
    environment = launched_environment(Path(args.config_file), args.num_processes) | own
    folder.mkdir(parents=True, exist_ok=True)
    log, exit_code = folder / "log.txt", 0
    log.write_text(" ".join(command) + "\n")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["zero_recipes.tools.preload"])
    # as accelerate, which starts torchrun's agent
    ranks, rendezvous = int(environment["WORLD_SIZE"]), {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    agent = LaunchConfig(1, 1, ranks, run_id=folder.name, max_restarts=0, start_method="forkserver", **rendezvous)
    for name in AGENTS:  # the log says it, and the row
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = {number: signal.getsignal(number) for number in HANDLED}
    with working(label, console):
        try:
            elastic_launch(agent, _rank)([args.training_script, *args.training_script_args], environment, log)
        except ChildFailedError as error:
            exit_code = 1
            with open(log, "a") as file:  # why a rank has ended: the agent may have ended rank 0 before it printed
                file.write(str(error))
        except SignalException as error:
            sys.exit(128 + error.sigval)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return exit_code, "\n".join(log.read_text(errors="replace").splitlines()[-400:])


def _rank(words: list[str], environment: dict[str, str], log: Path) -> None:
    end_with_parent()
    CLOCK.__init__(age())  # as in a process of its own
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)  # one that is killed has said what it could
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
