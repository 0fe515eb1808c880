"""What `accelerate launch` itself makes of a file, without starting anything."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from zero_recipes.config.ds_schema import quiet
from zero_recipes.core.findings import Finding, finding, first_line
from zero_recipes.libs import parts_of_accelerate as parts


def environment_of_launch(path: Path, num_processes: int | None) -> dict[str, str]:
    """The environment that it gives to what it starts, without ranks. Raises whatever accelerate raises."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepared

    parts.LAUNCH.require()
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


def launch_findings(path: Path | None, num_processes: int | None) -> list[Finding]:
    """What accelerate would end on before a run of ours begins, in its words; none without a file."""
    if path is None:
        return []
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            environment_of_launch(path, num_processes)
    except (Exception, SystemExit) as error:  # accelerate checks no types: it may raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        return [finding("ZR342", path=path, why=why.rstrip("."))]
    return list(_more_findings(path))


def _more_findings(path: Path) -> Iterator[Finding]:
    """What accelerate takes without a word."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file

    config, options = load_config_from_file(str(path)), launch.launch_command_parser().parse_args(["run_sft.py"])
    unknown = sorted(key for key in getattr(config, "deepspeed_config", None) or {} if key not in vars(options))
    if unknown:
        yield finding("ZR343", path=path, unknown=", ".join(map(str, unknown)))
    if (config.num_machines or 1) > 1:
        yield finding("ZR344", path=path, num_machines=config.num_machines)
