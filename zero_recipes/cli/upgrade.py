"""An old recipe in today's keys; all that it need not change stays to the letter.

PyYAML says where each key and value stands, and the text is changed there. ruamel.yaml does not do this whole: it drops
the comments after a key that is removed (ruamel.yaml 0.19.1, the next section's title among them) and writes the other
lines in its own form (`False` as `false`, lists without their indentation).
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config import keys, recipe
from zero_recipes.config.validation import accepted_types

DEPRECATED = keys.tables()["deprecated"]
RENAMED = {key: (row.get("to", ""), row.get("note", "")) for key, row in keys.tables()["renamed"].items()}
SWITCHES = {key: row["switch"] for key, row in keys.tables()["renamed"].items() if "switch" in row}
VALUES = {"packing_strategy": {"ffd": "bfd"}}  # key: {a former value: what it is called today}


def upgrade(path: Path, for_trl: bool = False) -> tuple[str, list[str]]:
    """(the new text, one sentence for each change). Keys that it cannot translate are left for `check` to name.

    `for_trl`: keys that TRL's own parser does not take become comments, so that `trl sft --config` reads the file.
    """
    mapping, text, changes = recipe.read_recipe_file(path), path.read_text(), []
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root.flow_style:  # {a: 1, b: 2}: its keys have no lines of their own
        return text, []
    mapping["template"] = template_path(path)
    written: set[str] = set()  # today's keys that an old one has become
    starts = [key.start_mark.index for key, _ in root.value]
    new = text[: starts[0]]
    for (key, value), (start, end) in zip(root.value, pairwise([*starts, len(text)]), strict=True):
        own, after = _without_what_follows(text[start:end])
        own = _upgraded(own, key, value, mapping, changes, written)
        new += own + after
    return _as_trl_takes_it(new, changes) if for_trl else (new, changes)


def template_path(recipe_path: Path) -> Path:
    """Where the chat template that an old recipe holds as text is written."""
    return recipe_path.with_suffix(".chat_template.jinja")


def chat_template(path: Path) -> str | None:
    """The chat template that the recipe holds as text; None without one."""
    text = recipe.read_recipe_file(path).get("chat_template")
    return text if isinstance(text, str) and text else None


def keys_of_ours(text: str) -> list[str]:
    """Keys of a recipe that TRL's own parser does not have."""
    ours = {field.name for field in dataclasses.fields(keys.RecipeArguments)}
    return sorted(set(yaml.safe_load(text) or {}) & ours)


def _as_trl_takes_it(text: str, changes: list[str]) -> tuple[str, list[str]]:
    ours = {field.name for field in dataclasses.fields(keys.RecipeArguments)}
    taken = set(keys.key_types()) - ours | {"env"}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    starts = [key.start_mark.index for key, _ in root.value]
    new = text[: starts[0]]
    for (key, _), (start, end) in zip(root.value, pairwise([*starts, len(text)]), strict=True):
        own, after = _without_what_follows(text[start:end])
        if key.value not in taken:
            changes.append(f"{key.value}: removed, TRL's parser has no such key")
            own = _commented(own)
        new += own + after
    return new, changes


def _without_what_follows(block: str) -> tuple[str, str]:
    """A key's own lines, and the blank lines and the comments at the margin after them."""
    lines = block.splitlines(keepends=True)
    own = max(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    return "".join(lines[: own + 1]), "".join(lines[own + 1 :])


def _upgraded(
    text: str,
    key_node: yaml.ScalarNode,
    value_node: yaml.Node,
    mapping: dict[str, Any],
    changes: list[str],
    written: set[str],
) -> str:
    """The lines of one key in today's form. Appends to `changes` what it does, and adds to `written`."""
    key, start = key_node.value, key_node.start_mark.index
    value, after_key = mapping.get(key), text[key_node.end_mark.index - start :]
    if value_node.start_mark.index < start:  # an alias: what it stands for is written elsewhere
        return text
    if key in ("dataset_mixer", "dataset_mixture") and isinstance(value, dict) and mapping.get("dataset_name"):
        changes.append(f"{key}: removed, dataset_name stands there too")
        return _commented(text)
    if key == "dataset_mixer" and isinstance(value, dict):
        return _comments(text) + _from_mixer(mapping, changes)
    if key == "dataset_mixture" and isinstance(value, dict) and isinstance(value.get("datasets"), list):
        return _comments(text) + _from_mixture(value, changes)
    if key == "dataset_splits":
        return (
            _comments(text) if isinstance(mapping.get("dataset_mixer"), dict) else _from_splits(text, mapping, changes)
        )
    if key == "chat_template":
        return _from_template(text, mapping, changes)
    if _ratio_counts(mapping) and key == "warmup_steps":
        changes.append("warmup_steps: removed, it was 0 and warmup_ratio counted")
        return _commented(text)
    if key in SWITCHES and not value:
        changes.append(f"{key}: removed, it was off")
        return _commented(text)
    name, note = (DEPRECATED[key], "") if key in DEPRECATED else RENAMED.get(key, ("", ""))
    if not name and note:
        changes.append(f"{key}: removed. {note}")
        return _commented(text)
    if name and (name in written or (name in mapping and not (key == "warmup_ratio" and _ratio_counts(mapping)))):
        changes.append(f"{key}: removed, {name} stands there too")
        return _commented(text)
    if name:
        written.add(name)
        changes.append(f"{key}: now {SWITCHES.get(key, name)}")
        return SWITCHES[key] + text[value_node.end_mark.index - start :] if key in SWITCHES else name + after_key
    if isinstance(value, str) and value in VALUES.get(key, {}):
        changes.append(f"{key}: {value} is called {VALUES[key][value]} now")
        return (
            text[: value_node.start_mark.index - start] + VALUES[key][value] + text[value_node.end_mark.index - start :]
        )
    if value is False and value_node.value.lower() in ("no", "off") and _takes_text_alone(key):
        changes.append(f"{key}: quoted, YAML takes {value} for a truth value")
        return text[: value_node.start_mark.index - start] + '"no"' + text[value_node.end_mark.index - start :]
    return text


def _ratio_counts(mapping: dict[str, Any]) -> bool:
    """In former versions warmup_ratio counted where warmup_steps was 0."""
    ratio = mapping.get("warmup_ratio")
    return isinstance(ratio, (int, float)) and 0 < ratio < 1 and mapping.get("warmup_steps", 1) in (0, None)


def _takes_text_alone(key: str) -> bool:
    types = keys.key_types()
    takes = accepted_types(types[key]) if key in types else set()
    return "string" in takes and "boolean" not in takes


def _splits(mapping: dict[str, Any]) -> tuple[str | None, str | None]:
    """(train, test) of alignment-handbook's dataset_splits."""
    splits = mapping.get("dataset_splits")
    names = [splits] if isinstance(splits, str) else splits if isinstance(splits, list) else []
    train = next((str(name) for name in names if "test" not in str(name)), None)
    return train, next((str(name) for name in names if "test" in str(name)), None)


def _from_splits(text: str, mapping: dict[str, Any], changes: list[str]) -> str:
    train, test = _splits(mapping)
    new = {"dataset_train_split": train, "dataset_test_split": test}
    new = {key: value for key, value in new.items() if value and key not in mapping}
    if not new:
        return text
    changes.append(f"dataset_splits: now {', '.join(new)}")
    return _comments(text) + yaml.safe_dump(new, sort_keys=False)


def _from_mixer(mapping: dict[str, Any], changes: list[str]) -> str:
    """alignment-handbook's former `dataset_mixer` and `dataset_splits` as TRL's dataset_name or datasets."""
    mixer, (train, test) = mapping["dataset_mixer"], _splits(mapping)
    whole = all(part in (1, None) for part in mixer.values())
    if len(mixer) == 1 and whole:
        new: dict[str, Any] = {"dataset_name": next(iter(mixer))}
        new |= {"dataset_train_split": train} if train else {}
        new |= {"dataset_test_split": test} if test else {}
    else:
        new = {
            "datasets": [
                {"path": name, "split": _share(train or "train", part, changes)} for name, part in mixer.items()
            ]
        }
        if test:
            changes.append("datasets: a mixture has no test split of its own; set test_split_size for evaluation")
    changes.append(f"dataset_mixer: now {', '.join(new)}")
    return yaml.safe_dump(new, sort_keys=False)


def _from_mixture(mixture: dict[str, Any], changes: list[str]) -> str:
    """alignment-handbook's `dataset_mixture` as TRL's datasets and test_split_size."""
    entries = []
    for entry in (entry for entry in mixture["datasets"] if isinstance(entry, dict)):
        named = {"path": entry.get("id"), "name": entry.get("config")}
        split = _share(entry.get("split") or "train", entry.get("weight"), changes)
        named |= {"split": split, "columns": entry.get("columns")}
        entries.append({key: value for key, value in named.items() if value is not None})
    new: dict[str, Any] = {"datasets": entries}
    if mixture.get("test_split_size") is not None:
        new["test_split_size"] = mixture["test_split_size"]
    changes.append(f"dataset_mixture: now {', '.join(new)}; TRL shuffles with the recipe's seed")
    return yaml.safe_dump(new, sort_keys=False)


def _share(split: str, weight: Any, changes: list[str]) -> str:
    """A split of which a share is taken: there a weight is a part of the data set's own rows, while TRL's `fraction`
    is one of the mixture (DatasetConfig), and cuts all sets to fit."""
    if not isinstance(weight, (int, float)) or weight >= 1 or "[" in split:
        return split
    percent = round(weight * 100)
    if percent != weight * 100:
        changes.append(f"datasets: {weight} of {split} is {percent} % now, data sets are cut at whole percents")
    return f"{split}[:{percent}%]"


def _from_template(text: str, mapping: dict[str, Any], changes: list[str]) -> str:
    if not isinstance(mapping["chat_template"], str) or not mapping["chat_template"]:
        changes.append("chat_template: removed, it was empty")
    elif "chat_template_path" in mapping:
        changes.append("chat_template: removed, chat_template_path stands there too")
    else:
        changes.append(f"chat_template: now chat_template_path, written to {mapping['template']}")
        return yaml.safe_dump({"chat_template_path": str(mapping["template"])}, width=1000)
    return _commented(text)


def _comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line.lstrip().startswith("#"))


def _commented(text: str) -> str:
    return "".join(f"# {line}" for line in text.splitlines(keepends=True))
