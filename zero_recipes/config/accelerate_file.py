"""An accelerate file as accelerate reads it, and where it is looked for.

accelerate 1.15 (commands/config/config_args.py, load_config_from_file) takes a path from the working directory, and
looks nowhere else. So the repository's folder has a symbolic link to each file of accelerate_configs/.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from zero_recipes.core.findings import Refusal, first_line, refusal

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

UNNAMED = -1  # accelerate's own value where a file has no num_processes
FOLDER = Path("accelerate_configs")


def read_accelerate_file(path: Path) -> ClusterConfig:
    """The file as accelerate reads it, its blocks as mappings and num_processes at least 1. Raises Refusal."""
    from accelerate.commands.config.config_args import load_config_from_file

    if not path.is_file():
        raise _absent(path)
    _refuse_link_as_text(path)
    try:
        config = load_config_from_file(str(path))
        if not hasattr(config, "deepspeed_config"):
            raise TypeError("it is for Amazon SageMaker, which starts its own machines: no run of this repository")
        for name in ("deepspeed_config", "fsdp_config", "parallelism_config"):
            if not isinstance(getattr(config, name), dict):  # by hand: accelerate does not check types
                raise TypeError(f"{name} is no mapping")
    except yaml.YAMLError as error:
        raise refusal("ZR305", path=path, error=str(error).replace("\n", " ")) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise refusal("ZR306", path=path, error=first_line(error).rstrip(".")) from error
    config.num_processes = UNNAMED if config.num_processes in (None, -1) else config.num_processes
    config.num_machines = 1 if config.num_machines is None else config.num_machines
    for name in ("num_processes", "num_machines"):
        value = getattr(config, name)
        if value is UNNAMED:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refusal("ZR307", name=name, path=path, value=value)
    return config


def _absent(path: Path) -> Refusal:
    """Names the file that is meant, where the strategies are at hand, and where to start from, where they are not."""
    here = sorted(found.name for found in FOLDER.glob("*.yaml"))
    if here:
        near = difflib.get_close_matches(f"{path.stem}.yaml", here, 1, 0.8)
        fix = f"--config_file {FOLDER / near[0]}" if near else f"{FOLDER}/ has {', '.join(here)}."
    else:
        repository = Path(__file__).resolve().parents[2]
        names = {found.name for found in (repository / FOLDER).glob("*.yaml")}
        name = f"{path.stem}.yaml" if f"{path.stem}.yaml" in names else "zero3.yaml"
        fix = "Start from the repository's folder" + (f" ({repository})" if names else "")
        fix += f": {name} and {FOLDER / name} are one file there, and the ds_config that it names is found."
    why = f"Paths are relative to the working directory, {Path.cwd()}."
    return refusal("ZR304", path=path, why=why, fix=fix)


def _refuse_link_as_text(path: Path) -> None:
    """A symbolic link that was written as a file, whose text is the path: git does so under core.symlinks=false."""
    text = path.read_bytes()[:300].decode(errors="replace").strip()
    target = path.parent / text
    if text.endswith(".yaml") and "\n" not in text and "\0" not in text and target.is_file():
        raise refusal("ZR363", path=path, target=target)
