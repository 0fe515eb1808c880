"""An old recipe in today's keys; all that it need not change stays to the letter.

PyYAML says where each key and value stands, and the text is changed there. ruamel.yaml does not do this whole: it drops
the comments after a key that is removed (ruamel.yaml 0.19.1, the next section's title among them) and writes the other
lines in its own form (`False` as `false`, lists without their indentation).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config import recipe, recipe_keys
from zero_recipes.config.validation import DEPRECATED, RENAMED, SWITCHES, accepted_types


def upgrade(path: Path) -> tuple[str, list[str]]:
    """(the new text, one sentence for each change). Keys that it cannot translate are left for `check` to name."""
    mapping, text, changes = recipe.read_recipe_file(path), path.read_text(), []
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root.flow_style:  # {a: 1, b: 2}: its keys have no lines of their own
        return text, []
    starts = [key.start_mark.index for key, _ in root.value]
    new = text[: starts[0]]
    for (key, value), (start, end) in zip(root.value, pairwise([*starts, len(text)]), strict=True):
        own, after = _without_what_follows(text[start:end])
        new += _upgraded(own, key, value, mapping, changes) + after
    return new, changes


def _without_what_follows(block: str) -> tuple[str, str]:
    """A key's own lines, and the blank lines and the comments at the margin after them."""
    lines = block.splitlines(keepends=True)
    own = max(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    return "".join(lines[: own + 1]), "".join(lines[own + 1 :])


def _upgraded(
    text: str, key_node: yaml.ScalarNode, value_node: yaml.Node, mapping: dict[str, Any], changes: list[str]
) -> str:
    """The lines of one key in today's form. Appends to `changes` what it does."""
    key, start = key_node.value, key_node.start_mark.index
    value, after_key = mapping.get(key), text[key_node.end_mark.index - start :]
    if value_node.start_mark.index < start:  # an alias: what it stands for is written elsewhere
        return text
    if key == "dataset_mixer" and isinstance(value, dict):
        return _from_mixer(text, mapping, changes)
    if key == "dataset_splits" and "dataset_mixer" in mapping:
        return _comments(text)  # its splits were written with the mixer
    if key in SWITCHES and value:
        changes.append(f"{key}: now {SWITCHES[key]}")
        return SWITCHES[key] + text[value_node.end_mark.index - start :]
    if key in SWITCHES:
        changes.append(f"{key}: removed, it was off")
        return _commented(text)
    name, note = (DEPRECATED[key], "") if key in DEPRECATED else RENAMED.get(key, ("", ""))
    if name and name not in mapping:
        changes.append(f"{key}: now {name}")
        return name + after_key
    if name or note:
        changes.append(f"{key}: removed, {name} stands there too" if name else f"{key}: removed. {note}")
        return _commented(text)
    if value is False and value_node.value.lower() in ("no", "off") and _takes_text_alone(key):
        changes.append(f"{key}: quoted, YAML takes {value} for a truth value")
        return text[: value_node.start_mark.index - start] + '"no"' + text[value_node.end_mark.index - start :]
    return text


def _takes_text_alone(key: str) -> bool:
    types = recipe_keys.key_types()
    takes = accepted_types(types[key]) if key in types else set()
    return "string" in takes and "boolean" not in takes


def _from_mixer(text: str, mapping: dict[str, Any], changes: list[str]) -> str:
    """alignment-handbook's `dataset_mixer` and `dataset_splits` as TRL's dataset_name or datasets."""
    mixer, splits = mapping["dataset_mixer"], mapping.get("dataset_splits")
    splits = [str(name) for name in splits] if isinstance(splits, list) else []
    train = next((name for name in splits if "test" not in name), None)
    test = next((name for name in splits if "test" in name), None)
    if len(mixer) == 1:
        new: dict[str, Any] = {"dataset_name": next(iter(mixer))}
        new |= {"dataset_train_split": train} if train else {}
        new |= {"dataset_test_split": test} if test else {}
    else:
        entries = [{"path": name, "split": train or "train", "fraction": part} for name, part in mixer.items()]
        new = {"datasets": entries}
        if test:
            changes.append("datasets: a mixture has no test split of its own; set test_split_size for evaluation")
    changes.append(f"dataset_mixer: now {', '.join(new)}")
    return _comments(text) + yaml.safe_dump(new, sort_keys=False)


def _comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line.lstrip().startswith("#"))


def _commented(text: str) -> str:
    return "".join(f"# {line}" for line in text.splitlines(keepends=True))
