"""What `accelerate launch` makes of a file, and a run in the environment of a launch."""

import os
from pathlib import Path


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


def launched(argv: list[str], environment: dict[str, str]) -> dict:
    """`train`, in the environment of a launch."""
    from tests.helpers.cases import train

    os.environ.update(environment)
    return train(argv)
