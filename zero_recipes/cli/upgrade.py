"""`check --upgrade`: an old recipe in today's keys, by the tables of config/keys.yaml; a pasted ds_config that runs."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson
import yaml

from zero_recipes.checks.deepspeed_rules import ADAMS, top_level_keys, zero_keys
from zero_recipes.checks.rules import options
from zero_recipes.config import keys, recipe
from zero_recipes.config.ds_config import OFFLOADS
from zero_recipes.core.findings import library_error_as_finding, refusal

# what the recipe decides: another value in the ds_config is refused by transformers or counts in silence
RECIPES_OWN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
DIGITS = re.compile(r"(:\s*)(\d[\d_]*\d)(?=\s*[,}\n#/])")  # 500_000_000, as Python writes it


def write_upgraded(old: Path) -> Path:
    """The recipe beside the old one, with one line printed for each change; the old one where nothing changes."""
    text, changes = upgrade(old)
    if not changes:
        return old
    return _written(old.with_suffix(".upgraded.yaml"), text, changes)


def write_runnable_ds_config(named: Any) -> Path | None:
    """A pasted ds_config as one that runs under a recipe, beside it; None where there is no such file, or nothing to
    change in it. One line is printed for each change. Raises Refusal."""
    old = Path(str(named))
    if not old.is_file() or old.suffix not in (".json", ".json5", ".hjson"):
        return None
    text = old.read_text()
    with library_error_as_finding(f"reading {old}"):  # DeepSpeed itself reads with hjson: comments, commas at the end
        pasted = hjson.loads(DIGITS.sub(lambda found: found[1] + found[2].replace("_", ""), text))
        pasted = json.loads(json.dumps(pasted))
        config = runnable_ds_config(pasted)
    changes = [*_changes(pasted, config)]
    written = json.dumps(config, indent=2) + "\n"
    with suppress(ValueError):
        if not changes and json.loads(text):
            return None
    return _written(old.with_suffix(".upgraded.json"), written, changes, "; set deepspeed: to it in the recipe")


def runnable_ds_config(pasted: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in which the recipe decides batch sizes, clipping, precision, optimizer and schedule ("auto"),
    ZeRO's keys are in their block, and what DeepSpeed does not read is gone."""
    config = copy.deepcopy(dict(pasted))
    zero = config.setdefault("zero_optimization", {})
    zero |= {key: config.pop(key) for key in zero_keys() - top_level_keys() if key in config}
    if "stage" not in zero:
        zero["stage"] = 3 if any(key.startswith("stage3_") for key in zero) else 2 if zero else 0
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    offloads = {key: zero[key] for key in OFFLOADS if zero.get(key)}
    if offloads.get("offload_param", {}).get("device") == "nvme":
        zero["stage3_prefetch_bucket_size"] = 0  # DeepSpeed's prefetcher does not know parameters on NVMe
    for block in offloads.values():
        if block.get("device") == "nvme" and not Path(block.get("nvme_path", "auto")).is_dir():
            block["nvme_path"] = "auto"
    config |= dict.fromkeys(RECIPES_OWN, "auto")
    config |= {name: {**config.get(name, {}), "enabled": "auto"} for name in ("bf16", "fp16")}
    if str(config.get("optimizer", {}).get("type")).lower() in ADAMS:
        config.pop("optimizer")
    config.pop("scheduler", None)
    for key in options()["without_effect"]:
        block, _, name = key.rpartition(".")
        (config.get(block, {}) if block else config).pop(name, None)
    return {key: value for key, value in config.items() if key in top_level_keys()}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changes(before, after, f"{place}{key}.")
        elif key not in new:
            yield f"{place}{key}: removed, it was {json.dumps(before)}"
        elif before != after:
            yield f"{place}{key}: {json.dumps(after)}" + (f", it was {json.dumps(before)}" if key in old else "")


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
