"""What `accelerate launch` makes of a file. File names are accelerate 1.15's."""

import argparse
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import DEFAULT, patch

from zero_recipes.config.ds_config import quiet
from zero_recipes.core.files import FILES, at_hand
from zero_recipes.core.findings import Finding, finding, first_line, refusal
from zero_recipes.core.library_errors import library_error_as_finding

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

DS_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
FOLDER = Path("accelerate_configs")
# keys of a recipe that `trl sft --config` takes for its launch
LAUNCH_KEYS = ("num_processes", "accelerate_config")
# variables of a launch that say how it shards
SHARDING_VARIABLES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE",
)
# what `accelerate launch` ends in (commands/launch.py, launch_command)
LAUNCHERS = (
    "deepspeed_launcher",
    "multi_gpu_launcher",
    "simple_launcher",
    "tpu_launcher",
    "tpu_pod_launcher",
)
ONE_MACHINE = ("--num_machines", "1", "--machine_rank", "0")  # whatever the file says


def config_files() -> dict[str, Path]:
    """Find the accelerate file of each strategy: in the working directory's accelerate_configs/, else in the package.

    Returns {strategy: path}.
    """
    paths = sorted((FILES / FOLDER).glob("*.yaml"))
    paths += sorted(FOLDER.glob("*.yaml"))
    return {path.stem: path for path in paths}


def read_accelerate_file(path: Path) -> "ClusterConfig":
    """Read an accelerate file as accelerate does, with all counts at least 1. Raises Refusal."""
    from accelerate.commands.config.config_args import load_config_from_file

    if not path.is_file():
        raise refusal("ZR304", path=path, cwd=Path.cwd(), known=", ".join(sorted(config_files())))
    with library_error_as_finding(f"reading the accelerate file {path}"):
        config = load_config_from_file(str(path))
        for name in ("deepspeed_config", "fsdp_config", "parallelism_config"):
            if not isinstance(getattr(config, name, None), dict):  # accelerate does not check; SageMaker's has none
                raise TypeError(f"{name} is not a mapping")
        for name in ("num_processes", "num_machines"):
            count = int(getattr(config, name) or 1)
            setattr(config, name, max(1, count))  # None and -1: the file does not say
    return config


def launched_environment(config_file: Path | None, num_processes: int | None) -> dict[str, str]:
    """The variables that `accelerate launch` would set for the file, with WORLD_SIZE. Raises Refusal.

    Args:
        config_file: None for a launch without one.
        num_processes: None for the file's own number.
    """
    if config_file is None:
        return {} if num_processes in (None, 1) else {"WORLD_SIZE": str(num_processes)}
    from accelerate.utils import clear_environment

    config = read_accelerate_file(config_file)
    refuse_what_no_launch_takes(config, config_file)
    count = num_processes or config.num_processes
    with library_error_as_finding(f"launching with {config_file}"), quiet(), clear_environment():
        environment, by_torchrun = _environment_of_launcher(config_file, count)
    if not by_torchrun:
        count = 1  # whatever num_processes says
    environment["WORLD_SIZE"] = str(count)
    if config.num_machines > 1 and count % config.num_machines == 0:
        environment["LOCAL_WORLD_SIZE"] = str(count // config.num_machines)
    return environment


def environments_of_ranks(
    config_file: Path, num_processes: int, port: int, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """The whole environment of each process that `accelerate launch` would start on this one machine, by rank.

    `port`: a free one, where the ranks meet.
    `environment`: of `accelerate launch` itself.
    The processes of torchrun have the variables of torch 2.13, distributed/elastic/agent/server/local_elastic_agent.py
    `_start_workers`, and multiprocessing/api.py. Two are others: rank 0 keeps the store, which torchrun's agent would
    keep, and without an agent there is no TORCHELASTIC_ERROR_FILE, which it reads. Raises Refusal.
    """
    doing = f"launching with {config_file}"
    with library_error_as_finding(doing), quiet(), patch.dict(os.environ, environment, clear=True):
        common, by_torchrun = _environment_of_launcher(config_file, num_processes, ONE_MACHINE)
    if not by_torchrun:
        return [common]
    if is_on(common, "DEEPSPEED"):  # `accelerate launch` imports it: deepspeed 0.19.8, __init__.py
        common.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    common |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    common |= {"ROLE_WORLD_SIZE": str(num_processes), "ROLE_NAME": "default"}
    common |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    common |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    common |= {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
    common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    ranks = []
    for rank in range(num_processes):
        number = str(rank)
        ranks.append(common | {"RANK": number, "LOCAL_RANK": number, "ROLE_RANK": number})
    return ranks


def _environment_of_launcher(
    config_file: Path, num_processes: int, options: Sequence[str] = ()
) -> tuple[dict[str, str], bool]:
    """(os.environ with what accelerate adds for the processes, whether torchrun then starts them).

    `options`: more of `accelerate launch`.
    """
    from accelerate.utils import launch

    args = _launch_arguments(config_file, num_processes, options)
    if args.use_deepspeed:
        return launch.prepare_deepspeed_cmd_env(args)[1], True
    if args.use_fsdp or args.multi_gpu:
        return launch.prepare_multi_gpu_env(args), True
    return launch.prepare_simple_launcher_cmd_env(args)[1], False


def _launch_arguments(config_file: Path, num_processes: int, options: Sequence[str]) -> argparse.Namespace:
    """As `accelerate launch` completes them, before it calls a launcher: here one that does nothing."""
    from accelerate.commands import launch

    words = ["--config_file", str(config_file), "--num_processes", str(num_processes)]
    words += ["--main_process_port", "0", *options, "run_sft.py"]
    args = launch.launch_command_parser().parse_args(words)
    with patch.multiple(launch, **dict.fromkeys(LAUNCHERS, DEFAULT)):
        launch.launch_command(args)
    return args


def file_findings(path: Path) -> Iterator[Finding]:
    """Findings about an accelerate file: keys that it does not know, and a launch on several machines."""
    from accelerate.commands.launch import launch_command_parser

    config = read_accelerate_file(path)
    known = vars(launch_command_parser().parse_args(["run_sft.py"]))
    unknown = sorted(map(str, config.deepspeed_config.keys() - known.keys()))
    if unknown:
        yield finding("ZR343", path=path, unknown=", ".join(unknown))
    if config.num_machines > 1:
        yield finding("ZR344", path=path, num_machines=config.num_machines)


def inline_ds_config(environment: Mapping[str, str], precision: str) -> dict[str, Any]:
    """The DeepSpeed configuration that accelerate makes of a file without `deepspeed_config_file`. Raises Refusal.

    `precision`: the recipe's, "bf16", "fp16" or "fp32".
    """
    from accelerate.utils import DeepSpeedPlugin, clear_environment

    written = dict(environment)  # clear_environment empties `environment` too, where that is os.environ
    doing = "reading the accelerate file's deepspeed_config"
    with library_error_as_finding(doing), quiet(), clear_environment():
        os.environ.update({name: text for name, text in written.items() if name.startswith("ACCELERATE_")})
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision({"fp32": "no"}.get(precision, precision))
    config = dict(plugin.deepspeed_config)
    del config["steps_per_print"]  # infinity, which JSON does not know; accelerate writes it again
    return config


def is_on(environment: Mapping[str, str], part: str) -> bool:
    """Whether the launcher's environment turns a part of accelerate on, as "FSDP" or "DEEPSPEED"."""
    return environment.get(f"ACCELERATE_USE_{part}", "").lower() == "true"


def ds_config_file(environment: Mapping[str, str]) -> str | None:
    """The path of the DeepSpeed configuration that an accelerate file names; None if it names none."""
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    return None if path.lower() in ("none", "") else path


def is_fsdp1(environment: Mapping[str, str]) -> bool:
    """Whether the file asks for FSDP1, accelerate's default. It is run as FSDP2: the losses are the same."""
    return is_on(environment, "FSDP") and environment.get("FSDP_VERSION", "1") != "2"


def launcher_findings(environment: Mapping[str, str], precision: str) -> Iterator[Finding]:
    """Findings about what the launcher sets against the recipe: FSDP1, and another precision.

    A recipe in fp32 would train in the file's precision; any other keeps its own.
    """
    if is_fsdp1(environment):
        yield finding("ZR314")
    of_the_file = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if of_the_file not in ("no", precision):
        level = "error" if precision == "fp32" or of_the_file == "fp8" else "warning"
        yield finding("ZR339", of_the_file=of_the_file, precision=precision, level=level)


def refuse_what_no_launch_takes(config: "ClusterConfig", path: Path) -> None:
    """Refuse an accelerate file whose launch would silently train something else, or wait without an end."""
    if config.mpirun_config:
        raise refusal("ZR331", path=path)
    if config.num_machines == 1:
        return
    about = {"path": path, "num_machines": config.num_machines}
    ds = config.deepspeed_config
    launcher = ds.get("deepspeed_multinode_launcher") or "pdsh"
    if ds and launcher not in ("standard", "nossh"):
        hosts = ds.get("deepspeed_hostfile")
        if not (hosts and Path(hosts).is_file()):  # a launcher that is not installed DeepSpeed itself refuses
            raise refusal("ZR335", **about, launcher=launcher, hosts=hosts)
    address = config.main_process_ip
    problem = None if address is None else _problem_of_address(str(address))  # or by --main_process_ip
    if problem:
        raise refusal("ZR336", **about, address=address, problem=problem)


def _problem_of_address(address: str) -> str | None:
    """Why no other machine can reach it."""
    try:
        found = socket.getaddrinfo(address, None)[0][4][0]
    except (OSError, UnicodeError) as error:
        return first_line(error)
    if ipaddress.ip_address(found).is_loopback:
        return "it is this machine's own loopback address"
    return None


def launch_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that describe its launch, without those that are null."""
    return {key: mapping[key] for key in LAUNCH_KEYS if mapping.get(key) is not None}


def launched_as_named(mapping: Mapping[str, Any], num_processes: int | None = None) -> dict[str, str]:
    """The variables that a launch with the recipe's own keys would set. Raises Refusal.

    `num_processes`: where the recipe names none.
    """
    count = launch_of(mapping).get("num_processes", num_processes)
    return launched_environment(file_named(mapping), count)


def file_named(mapping: Mapping[str, Any]) -> Path | None:
    """The accelerate file that a recipe names: a path, or one of TRL's (trl/cli/accelerate_config.py); None without."""
    named = mapping.get("accelerate_config")
    if named is None:
        return None
    file = at_hand(str(named), str(FOLDER))
    trls = resources.files("trl.accelerate_configs").joinpath(f"{named}.yaml")
    if trls.is_file() and not file.is_file():
        return Path(str(trls))
    return file


def launch_key_findings(path: Path, mapping: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Finding]:
    """A finding where the run was launched in another way than its recipe says. Raises Refusal for a bad file.

    Args:
        path: the recipe's file.
        mapping: its keys and values.
        environment: the launcher's variables.
    """
    named = launch_of(mapping)
    if not named:
        return
    processes = environment.get("WORLD_SIZE", "1")
    wanted = launched_as_named(mapping, int(processes))
    different = wanted.get("WORLD_SIZE", "1") != processes
    if "accelerate_config" in named:
        different |= any(wanted.get(name) != environment.get(name) for name in SHARDING_VARIABLES)
    if different:
        written = ", ".join(f"{key}: {value}" for key, value in named.items())
        yield finding("ZR347", path=path, written=written, processes=processes)
