"""`check --upgrade`: an old recipe in today's keys, by the tables of config/keys.yaml; a ds_config without comments."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson
import yaml

from zero_recipes.config import keys, recipe
from zero_recipes.core.findings import library_error_as_finding, refusal


def write_upgraded(old: Path) -> Path:
    """The recipe beside the old one, with one line printed for each change; the old one where nothing changes."""
    text, changes = upgrade(old)
    if not changes:
        return old
    return _written(old.with_suffix(".upgraded.yaml"), text, changes)


def write_strict_ds_config(named: Any) -> Path | None:
    """A ds_config with comments or commas at the end as strict JSON, beside it; None where it is that already, or no
    such file. DeepSpeed reads all of these itself, by hjson; transformers and accelerate do not. Raises Refusal."""
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    old = Path(str(named))
    if not old.is_file():
        return None
    text = old.read_text()
    with suppress(ValueError):
        json.loads(text)
        return None
    with library_error_as_finding(f"reading {old}"):
        config = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    new = old.with_suffix(".upgraded.json")
    return _written(new, json.dumps(config, indent=2) + "\n", [], "; set deepspeed: to it in the recipe")


def upgrade(path: Path) -> tuple[str, list[str]]:
    """(the new text, one line for each change). Keys that it cannot translate are left for `check` to name."""
    recipe.read_recipe_file(path)  # refuses one that has a key twice
    old, new, changes = yaml.safe_load(path.read_text()), {}, []
    for key, value in old.items():
        today = dict(_today(key, value))
        if key not in today and today.keys() & (old.keys() | new.keys()):
            today = {}
        if today != {key: value}:
            changes.append(f"{key}: {f'now {json.dumps(today)[1:-1]}' if today else f'removed, it was {value!r}'}")
        new |= today
    if not changes:
        return path.read_text(), []
    header = "".join(f"# {line}\n" for line in (f"{path} with current keys:", *changes))
    return header + yaml.safe_dump(new, sort_keys=False, allow_unicode=True), changes


def _today(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The key of today with its value; nothing where there is none any more."""
    tables = keys.tables()
    row = tables["renamed"].get(key, {"to": tables["deprecated"].get(key, key)})
    if isinstance(value, (dict, list)) and key in tables["renamed"]:
        yield key, value  # another form too: `check` says which
    elif "switch" in row:
        yield from (yaml.safe_load(row["switch"]) if value else {}).items()
    elif row.get("to"):
        yield row["to"], value


def _written(new: Path, text: str, changes: list[str], use: str = "") -> Path:
    if new.exists() and new.read_text() != text:
        raise refusal("ZR127", new=new)
    new.write_text(text)
    print(*changes, f"written: {new}{use}", sep="\n")
    return new
