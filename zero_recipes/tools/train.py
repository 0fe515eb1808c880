"""`zero-recipes train` and `init`."""

import argparse
import os
import shutil
from importlib import resources
from pathlib import Path

from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import FOLDER, LAUNCH_KEYS, file_named, read_accelerate_file
from zero_recipes.core.files import FILES, as_typed, at_hand, load_yaml
from zero_recipes.core.findings import refusal
from zero_recipes.core.host import Host
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import STOPPING
from zero_recipes.core.run_end import FAILED, INTERRUPTED, PREEMPTED, REFUSED

# accelerate files at the top of a folder that `init` fills, as in the repository: `--config_file zero3.yaml`
LINKED = ("ddp.yaml", "zero1.yaml", "zero2.yaml", "zero3.yaml")
MY_DATA = "my-data.yaml"
LAUNCH_PORT = 29500
MEETING_PORT = 29501
MEETING_SECONDS = 600.0
END_SECONDS = 600  # for a step, an evaluation's batch, and a checkpoint


def init(arguments: argparse.Namespace) -> int:
    """Copy the package's files into a folder, for editing. Returns the exit code. Raises Refusal if a file exists."""
    folder = arguments.folder
    copied = sorted(path.name for path in FILES.iterdir() if not path.name.startswith("__"))
    named = [*copied, *LINKED, MY_DATA]
    there = [name for name in named if (folder / name).exists()]
    if there:
        raise refusal("ZR880", folder=folder.resolve(), there=", ".join(there))
    folder.mkdir(parents=True, exist_ok=True)
    for name in copied:
        if (FILES / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.py")
            shutil.copytree(FILES / name, folder / name, ignore=ignored)
        else:
            shutil.copy(FILES / name, folder)
    for name in LINKED:
        _link(FOLDER / name, folder / name)
    text = resources.files(__package__).joinpath("templates", MY_DATA).read_text(encoding="utf-8")
    (folder / MY_DATA).write_text(text, encoding="utf-8")
    command = "zero-recipes train recipes/tiny.yaml"
    if not folder.samefile("."):
        command = f"cd {folder} && {command}"
    print(f"written to {folder.resolve()}: {', '.join(named)}\n{command}")
    print(f"For data of your own, edit {MY_DATA}: its comments say what to change.")
    return 0


def _link(target: Path, link: Path) -> None:
    """Make a link to a file beside it; a copy where the file system has no links, as on some volumes."""
    try:
        link.symlink_to(target)
    except OSError:
        shutil.copy(link.parent / target, link)


def train(arguments: argparse.Namespace) -> int:
    """Launch a run in this process, so that its own exit code is known: `accelerate launch` makes 1 of all."""
    import torch
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    mapping = recipes.recipe_in_force(arguments.recipe)
    named = arguments.config_file or file_named(mapping)
    file = named or at_hand(FOLDER / "ddp.yaml")
    machines = read_accelerate_file(file).num_machines
    hosts = arguments.hosts or []
    if machines > 1 and not hosts:
        raise refusal("ZR881", file=as_typed(file), machines=machines)
    machines = len(hosts) or 1
    gpus = 0 if mapping.get("use_cpu") else torch.cuda.device_count()
    processes = arguments.num_processes or mapping.get(LAUNCH_KEYS[0])
    if processes is None:
        processes = (gpus or 1) * machines
        if named is not None:
            say_other_count(named, processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(Host().threads(processes // machines)))
    options = ["--config_file", file, "--num_processes", processes]
    if machines > 1:
        from zero_recipes.engine.group import wait_for_hosts

        wait_for_hosts(hosts, arguments.machine_rank, MEETING_PORT, MEETING_SECONDS)
        options += ["--num_machines", machines, "--machine_rank", arguments.machine_rank]
        options += ["--main_process_ip", hosts[0], "--main_process_port", LAUNCH_PORT]
        options += ["--deepspeed_multinode_launcher", "standard"]
    else:
        options += ["--main_process_port", 0]  # a free one
    words = [*options, at_hand("run_sft.py"), arguments.recipe, *arguments.overrides]
    launched = launch.launch_command_parser().parse_args([str(word) for word in words])
    # torchrun hands these signals on, and kills what is left after so many seconds
    launched.signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    launched.shutdown_timeout = END_SECONDS
    with library_error_as_finding(f"launching with {as_typed(file)}"):
        try:
            launch.launch_command(launched)
        except ChildFailedError as error:  # each rank has printed why
            return _exit_code({failure.exitcode for failure in error.failures.values()})
        except SignalException as error:
            if isinstance(error.__context__, SignalException):  # a second Ctrl-C
                return INTERRUPTED
            return PREEMPTED if error.sigval in STOPPING else 128 + error.sigval
    return 0


def say_other_count(file: Path, processes: int) -> None:
    """Print that the accelerate file has another number of processes than are started.

    The files of this repository have 2, whatever the machine has: one process per GPU is what most runs want.
    """
    written = load_yaml(file.read_text()).get("num_processes")
    if written not in (None, -1, processes):
        started = "1 process" if processes == 1 else f"{processes} processes"
        print(f"starting {started}; for the {written} of {as_typed(file)} add --num_processes {written}", flush=True)


def _exit_code(ranks: set[int]) -> int:
    """`ranks`: exit codes of those that failed; a negative one is a signal."""
    if ranks <= {-number for number in STOPPING}:
        return PREEMPTED
    for code in (REFUSED, PREEMPTED):
        if code in ranks:
            return code
    return FAILED
