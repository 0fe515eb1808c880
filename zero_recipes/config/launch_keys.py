"""`num_processes` and `accelerate_config` in a recipe, which `trl sft --config` takes for its launch.

A recipe says nothing about its launch here, so they are taken where they agree with the launch as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from zero_recipes.config.accelerate import launched_environment
from zero_recipes.core.findings import Finding, Refusal, finding, refusal

LAUNCH = ("num_processes", "accelerate_config")
# variables of a launch that say how it shards
SHARDING = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DEEPSPEED_CONFIG_FILE")


def launch_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The launch that a recipe names: a part of its keys."""
    return {key: mapping[key] for key in LAUNCH if mapping.get(key) is not None}


def launched_as_named(mapping: Mapping[str, Any]) -> dict[str, str]:
    """The environment of the launch that a recipe names. Raises Refusal."""
    named = launch_of(mapping)
    return launched_environment(_file(named.get("accelerate_config")), _count(named.get("num_processes")))


def launch_key_findings(path: Path, mapping: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Finding]:
    """At most one finding: the launch is another than the recipe names. `environment`: the launcher's."""
    named = launch_of(mapping)
    if not named:
        return
    processes = environment.get("WORLD_SIZE", "1")
    try:
        count, file = _count(named.get("num_processes")), _file(named.get("accelerate_config"))
        wanted = launched_environment(file, count or int(processes))
    except Refusal as refusal:
        yield from refusal.findings
        return
    different = count is not None and str(count) != processes
    if file is not None:
        different |= any(_said(wanted, name) != _said(environment, name) for name in SHARDING)
    if different:
        written = ", ".join(f"{key}: {value}" for key, value in named.items())
        options = ([] if file is None else ["--config_file", str(file)]) + ["--num_processes", str(count or processes)]
        yield finding(
            "ZR347",
            path=path,
            written=written,
            processes=processes,
            why="" if processes == "1" else "es",
            options=" ".join(options),
        )


def _said(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "").lower()
    return "" if value in ("false", "none") else value


def _count(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise refusal("ZR348", value=value)


def _file(name: Any) -> Path | None:
    """As TRL finds it (cli/accelerate_config.py): a file, or the name of one of its own."""
    if name is None:
        return None
    if Path(str(name)).is_file():
        return Path(str(name))
    own = resources.files("trl.accelerate_configs")
    found = own.joinpath(f"{name}.yaml")
    if isinstance(name, str) and "/" not in name and found.is_file():
        return Path(str(found))
    known = sorted(path.name.removesuffix(".yaml") for path in own.iterdir() if path.name.endswith(".yaml"))
    raise refusal("ZR349", name=name, known=", ".join(known))
