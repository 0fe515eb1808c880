"""What `accelerate launch` makes of a file, and what in that contradicts itself. File names are accelerate 1.15's."""

import difflib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_recipes.config.ds_config import quiet
from zero_recipes.core.files import FILES, at_hand
from zero_recipes.core.findings import Finding, finding, first_line, library_error_as_finding, refusal

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

# accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks
AMBIGUOUS = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
AMBIGUOUS += ("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path")
AMBIGUOUS += ("zero3_save_16bit_model", "mixed_precision")
DS_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
FOLDER = Path("accelerate_configs")
# keys of a recipe that `trl sft --config` takes for its launch
LAUNCH_KEYS = ("num_processes", "accelerate_config")
# variables of a launch that say how it shards
SHARDING = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DEEPSPEED_CONFIG_FILE")


def config_files() -> dict[str, Path]:
    """{strategy: its accelerate file}: of the working directory's accelerate_configs/, else the package's."""
    return {path.stem: path for folder in (FILES / FOLDER, FOLDER) for path in sorted(folder.glob("*.yaml"))}


def read_accelerate_file(path: Path) -> "ClusterConfig":
    """The file as accelerate (commands/config/config_args.py, load_config_from_file) reads it, its blocks as mappings
    and its counts at least 1. Raises Refusal."""
    from accelerate.commands.config.config_args import load_config_from_file

    if not path.is_file():
        known = config_files()
        near = difflib.get_close_matches(path.stem, known, 1, 0.8)
        fix = f"--config_file {known[near[0]]}" if near else f"There are {', '.join(sorted(known))}."
        raise refusal("ZR304", path=path, cwd=Path.cwd(), fix=fix)
    with library_error_as_finding(f"reading the accelerate file {path}"):
        config = load_config_from_file(str(path))
        if not hasattr(config, "deepspeed_config"):
            raise TypeError("it is for Amazon SageMaker, which starts its own machines")
        for name in ("deepspeed_config", "fsdp_config", "parallelism_config"):
            if not isinstance(getattr(config, name), dict):  # accelerate does not check types
                raise TypeError(f"{name} is not a mapping")
        for name in ("num_processes", "num_machines"):
            setattr(config, name, max(1, int(getattr(config, name) or 1)))  # None and -1: the file does not say
    return config


def launched_environment(config_file: Path | None, num_processes: int | None) -> dict[str, str]:
    """The variables that `accelerate launch` sets, by its own functions, and the number of processes. Raises Refusal
    for a file that it does not take."""
    if config_file is None:
        return {} if num_processes in (None, 1) else {"WORLD_SIZE": str(num_processes)}
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import clear_environment, launch

    config = read_accelerate_file(config_file)
    refuse_what_no_launch_takes(config, config_file)
    count = num_processes or config.num_processes
    options = ["--config_file", str(config_file), "--num_processes", str(count), "--main_process_port", "0"]
    with library_error_as_finding(f"launching with {config_file}"), quiet(), clear_environment():
        args = launch_command_parser().parse_args([*options, "run_sft.py"])
        args, _, has_precision = _validate_launch_command(args)
        fields = [*config.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(map(str, fields))
        if args.use_deepspeed:
            _, environment = launch.prepare_deepspeed_cmd_env(args)
        elif args.use_fsdp or args.multi_gpu:
            environment = launch.prepare_multi_gpu_env(args)
        else:  # one process, whatever num_processes says
            (_, environment), count = launch.prepare_simple_launcher_cmd_env(args), 1
    environment["WORLD_SIZE"] = str(count)
    if config.num_machines > 1 and count % config.num_machines == 0:
        environment["LOCAL_WORLD_SIZE"] = str(count // config.num_machines)
    return environment


def file_findings(path: Path) -> Iterator[Finding]:
    """What `accelerate launch` takes from a file without a word."""
    from accelerate.commands.launch import launch_command_parser

    config, options = read_accelerate_file(path), vars(launch_command_parser().parse_args(["run_sft.py"]))
    if unknown := sorted(str(key) for key in config.deepspeed_config if key not in options):
        yield finding("ZR343", path=path, unknown=", ".join(unknown))
    if config.num_machines > 1:
        yield finding("ZR344", path=path, num_machines=config.num_machines)


def inline_ds_config(environment: Mapping[str, str], precision: str) -> dict[str, Any]:
    """The ds_config that accelerate makes of a file without `deepspeed_config_file`, from DeepSpeedPlugin.
    `environment`: the launcher's; `precision`: the recipe's, "bf16", "fp16" or "fp32". Raises Refusal."""
    from accelerate.utils import DeepSpeedPlugin, clear_environment

    written = {name: text for name, text in environment.items() if name.startswith("ACCELERATE_")}
    # clear_environment empties `environment` too, where that is os.environ
    with library_error_as_finding("reading the accelerate file's deepspeed_config"), quiet(), clear_environment():
        os.environ.update(written)
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision({"fp32": "no"}.get(precision, precision))
    config = dict(plugin.deepspeed_config)
    del config["steps_per_print"]  # infinity, which JSON does not know; accelerate writes it again
    return config


def is_fsdp1(environment: Mapping[str, str]) -> bool:
    """Whether the launcher's file is for FSDP1, accelerate's default; it is run as FSDP2, whose losses are the same."""
    by_fsdp = environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return by_fsdp and environment.get("FSDP_VERSION", "1") != "2"


def launcher_findings(environment: Mapping[str, str], precision: str) -> Iterator[Finding]:
    """What an accelerate file says against the recipe and the ds_config that it names. `environment`: the launcher's;
    `precision`: the recipe's. One in fp32 would train in the file's precision; any other keeps its own."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        yield finding("ZR301")
    if is_fsdp1(environment):
        yield finding("ZR314")
    of_the_file = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if of_the_file not in ("no", precision):
        level = "error" if precision == "fp32" or of_the_file == "fp8" else "warning"
        yield finding("ZR339", of_the_file=of_the_file, precision=precision, level=level)
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() in ("none", ""):
        return
    written = environment.get(DS_FIELDS, "").split(",")
    beside = [name for name in AMBIGUOUS if name in written]
    if beside:
        yield finding("ZR303", beside=", ".join(beside))


def refuse_what_no_launch_takes(config: "ClusterConfig", path: Path) -> None:
    """Refuse a file whose launch trains something else silently, or waits without an end."""
    if config.mpirun_config:
        raise refusal("ZR331", path=path)
    if config.num_machines == 1:
        return
    ds, launcher = config.deepspeed_config, config.deepspeed_config.get("deepspeed_multinode_launcher") or "pdsh"
    if ds and launcher not in ("standard", "nossh"):
        hosts = ds.get("deepspeed_hostfile")
        if not (hosts and Path(hosts).is_file()):  # a launcher that is not installed DeepSpeed itself refuses
            raise refusal("ZR335", path=path, num_machines=config.num_machines, launcher=launcher, hosts=hosts)
    address = config.main_process_ip
    if address is None:
        return  # the command line names it: --main_process_ip
    try:
        found = socket.getaddrinfo(str(address), None)[0][4][0]
        problem = "it is this machine's own loopback address" if ipaddress.ip_address(found).is_loopback else None
    except (OSError, UnicodeError) as error:
        problem = first_line(error)
    if problem:
        raise refusal("ZR336", address=address, path=path, num_machines=config.num_machines, problem=problem)


def launch_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The launch that a recipe names, as `trl sft --config` reads it: a part of its keys."""
    return {key: mapping[key] for key in LAUNCH_KEYS if mapping.get(key) is not None}


def launched_as_named(mapping: Mapping[str, Any], num_processes: int | None = None) -> dict[str, str]:
    """`launched_environment` of the launch that a recipe names. `num_processes`: where the recipe names none.
    An accelerate_config is a file or the name of one of TRL's own (trl/cli/accelerate_config.py)."""
    return launched_environment(file_named(mapping), launch_of(mapping).get("num_processes", num_processes))


def file_named(mapping: Mapping[str, Any]) -> Path | None:
    """The accelerate file of the launch that a recipe names."""
    named = mapping.get("accelerate_config")
    if named is None or (file := at_hand(str(named), str(FOLDER))).is_file():
        return None if named is None else file
    trls = resources.files("trl.accelerate_configs").joinpath(f"{named}.yaml")
    return Path(str(trls) if trls.is_file() else str(named))


def launch_key_findings(path: Path, mapping: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Finding]:
    """At most one finding: the launch is another than the recipe names. `environment`: the launcher's."""
    named = launch_of(mapping)
    if not named:
        return
    processes = environment.get("WORLD_SIZE", "1")
    wanted = launched_as_named(mapping, int(processes))
    different = wanted.get("WORLD_SIZE", "1") != processes
    if "accelerate_config" in named:
        different |= any(wanted.get(name) != environment.get(name) for name in SHARDING)
    if different:
        written = ", ".join(f"{key}: {value}" for key, value in named.items())
        yield finding("ZR347", path=path, written=written, processes=processes)
