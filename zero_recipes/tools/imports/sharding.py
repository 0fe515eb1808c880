"""How an imported recipe is sharded: an accelerate file in the place of the other trainer's `deepspeed` or `fsdp`."""

from pathlib import Path
from typing import Any

from zero_recipes.config.ds_config import DsConfig, read_json_mapping
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.tools.imports.draft import Draft
from zero_recipes.tools.imports.models import table


def put_sharding(draft: Draft, named: str | dict[str, Any] | None) -> None:
    """Name the accelerate file for FSDP, and for a ds_config that the other trainer brings. Another is copied.

    `named`: the key `deepspeed`.
    """
    if not named:
        _fsdp(draft)
        return
    if isinstance(named, dict):
        draft.put("deepspeed", "deepspeed", deepspeed=named)
        return
    found = draft.find(named)
    row = table(draft.source)["deepspeed"].get(Path(named).name)
    if row is not None and (found is None or _is_strategy(found, row["strategy"])):
        draft.add_remarks("deepspeed", row)
        draft.put("deepspeed", "deepspeed", accelerate_config=f"{row['strategy']}.yaml")
    elif found is None:
        draft.loses("deepspeed", f"{named} was not found; zero-recipes plan recommends a strategy")
    else:
        copy = draft.at.with_name(found.name)
        draft.note("deepspeed", f"{named} is copied: it is none of zero-recipes' strategies")
        with library_error_as_finding(f"reading {found}"):
            draft.files[copy] = found.read_text(encoding="utf-8")
        draft.put("deepspeed", "deepspeed", deepspeed=str(copy))


def _is_strategy(path: Path, name: str) -> bool:
    """Whether it shards as the well-known file of its name."""
    with library_error_as_finding(f"reading {path}"):
        config = DsConfig(read_json_mapping(path))
    return config.name == name and config.optimizer is None


def _fsdp(draft: Draft) -> None:
    theirs = draft.theirs
    blocks = ("fsdp", "fsdp_config")
    if not any(value for key, value in theirs.items() if key.partition(".")[0] in blocks):
        return
    named = str(theirs.get("fsdp"))
    if named.endswith(".json"):
        draft.loses("fsdp", f"{named} is not read: fsdp2.yaml shards weights, offloads nothing")
    if theirs.get("load_in_8bit"):
        draft.put("fsdp", "fsdp", accelerate_config="zero2.yaml")
        draft.loses("fsdp", "every GPU holds all 8-bit weights (ZeRO-2), because FSDP2 cannot shard them")
    else:
        draft.put("fsdp", "fsdp", accelerate_config="fsdp2.yaml")
