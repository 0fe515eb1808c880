"""`check --upgrade`: an old recipe in today's keys, by the tables of config/keys.yaml; every other line stays as it is.

PyYAML says where each key is, and the text is changed there. ruamel.yaml 0.19.1 does not do this: it drops the comments
after a key that is removed and writes the other lines in its own form.
"""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

from zero_recipes.config import keys, recipe
from zero_recipes.core.findings import refusal


def write_upgraded(old: Path, for_trl: bool) -> Path:
    """The recipe beside the old one, with one line printed for each change. Raises Refusal."""
    text, changes = upgrade(old, for_trl)
    new = old.with_suffix(".trl.yaml" if for_trl else ".upgraded.yaml")
    _write(new, text)
    print(*changes, f"written: {new}", sep="\n")
    return new


def write_for_fsdp2(old: Path | None) -> Path | None:
    """An accelerate file for FSDP1 as accelerate itself converts it; any other file stays."""
    config = yaml.safe_load(old.read_text()) if old is not None and old.is_file() else None
    fsdp = config.get("fsdp_config") if isinstance(config, dict) else None
    if not isinstance(fsdp, dict) or fsdp.get("fsdp_version", 1) == 2 or config.get("distributed_type") != "FSDP":
        return old
    new = old.with_suffix(".fsdp2.yaml")
    _write(new, yaml.safe_dump(convert_config_to_fsdp2(config), sort_keys=False))
    print(f"written: {new}, for FSDP2 (accelerate to-fsdp2)")
    return new


def upgrade(path: Path, for_trl: bool = False) -> tuple[str, list[str]]:
    """(the new text, one line for each change). Keys that it cannot translate are left for `check` to name. `for_trl`:
    keys that TRL's own parser does not take become comments, so that `trl sft --config` reads the file."""
    mapping, lines, changes = recipe.read_recipe_file(path), path.read_text().splitlines(keepends=True), []
    root = yaml.compose("".join(lines), Loader=yaml.SafeLoader)
    starts = [key.start_mark.line for key, _ in root.value]
    new = lines[: starts[0]]
    present = set(mapping)
    for (key, _), (start, end) in zip(root.value, pairwise([*starts, len(lines)]), strict=True):
        today = _today(key.value, mapping[key.value])
        taken = today.partition(":")[0]
        if taken != key.value and taken in present:
            today = ""
        present.add(taken)
        if for_trl and today and taken not in _trls_keys():
            today = ""
        block = _written(lines[start:end], key.value, today)
        if block != lines[start:end]:
            changes.append(f"{key.value}: {f'now {today}' if today else 'removed'}")
        new += block
    return "".join(new), changes


def _today(key: str, value: Any) -> str:
    """The key of today, or "key: value" where an old switch became a value; "" where nothing does."""
    if key in keys.tables()["deprecated"]:
        return keys.tables()["deprecated"][key]
    row = keys.tables()["renamed"].get(key, {"to": key})
    if isinstance(value, (dict, list)) and row.get("to") != key:
        return key  # another form too: `check` says which
    if "switch" in row:
        return row["switch"] if value else ""
    return row.get("to", "")


def _trls_keys() -> set[str]:
    return set(keys.key_types()) - {field.name for field in dataclasses.fields(keys.RecipeArguments)} | {"env"}


def _written(block: list[str], key: str, today: str) -> list[str]:
    """The lines of one key under its name of today; as comments where it has none. What follows them stays."""
    if today == key:
        return block
    end = 1 + max(i for i, line in enumerate(block) if line.strip() and not line.startswith("#"))
    if not today:
        return [f"# {line}" for line in block[:end]] + block[end:]
    name, _, rest = block[0].partition(":")
    if ":" not in today:
        return [f"{name.replace(key, today)}:{rest}", *block[1:]]
    comment = f"  # {rest.partition('# ')[2]}" if "# " in rest else "\n"
    return [today + comment, *block[end:]]


def _write(new: Path, text: str) -> None:
    if new.exists() and new.read_text() != text:
        raise refusal("ZR127", new=new)
    new.write_text(text)
