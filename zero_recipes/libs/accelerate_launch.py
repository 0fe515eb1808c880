"""What `accelerate launch` takes from a file without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zero_recipes.core.findings import Finding, finding


def launch_findings(path: Path | None) -> Iterator[Finding]:
    """Nothing without a file. What accelerate refuses itself, it refuses before a process starts."""
    if path is None:
        return
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    options = vars(launch.launch_command_parser().parse_args(["run_sft.py"]))
    unknown = sorted(str(key) for key in getattr(config, "deepspeed_config", None) or {} if key not in options)
    if unknown:
        yield finding("ZR343", path=path, unknown=", ".join(unknown))
    if (config.num_machines or 1) > 1:
        yield finding("ZR344", path=path, num_machines=config.num_machines)
