"""An old recipe in today's keys, its comments and order kept: line by line, for each key that stands at the margin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config import recipe
from zero_recipes.config.validation import DEPRECATED, RENAMED, SWITCHES, accepted_types


def upgrade(path: Path) -> tuple[str, list[str]]:
    """(the new text, one sentence for each change). Keys that it cannot translate are left for `check` to name."""
    mapping = recipe.read(path)
    blocks = _blocks(path.read_text())
    said: list[str] = []
    return "".join(_upgraded(key, text, mapping, said) for key, text in blocks), said


def _blocks(text: str) -> list[tuple[str | None, str]]:
    """The file in pieces: a key at the margin with all that belongs to it, or what stands between (key None)."""
    pieces: list[tuple[str | None, str]] = []
    for line in text.splitlines(keepends=True):
        found = re.match(r"([A-Za-z_]\w*)\s*:", line)
        inside = pieces and pieces[-1][0] is not None and re.match(r"[ \t-]+\S", line)
        if inside:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + line)
        else:
            pieces.append((found[1] if found else None, line))
    return pieces


def _upgraded(key: str | None, text: str, mapping: dict[str, Any], said: list[str]) -> str:
    value = mapping.get(key)
    if key == "dataset_mixer":
        return _from_mixer(text, mapping, said)
    if key == "dataset_splits" and "dataset_mixer" in mapping:
        return ""  # its splits were written with the mixer
    if key in SWITCHES:
        said.append(f"{key}: now {SWITCHES[key]}" if value else f"{key}: removed, it was off")
        return f"{SWITCHES[key]}{_comment(text)}\n" if value else _commented(text)
    if key in DEPRECATED or (key in RENAMED and RENAMED[key][0]):
        new = DEPRECATED.get(key) or RENAMED[key][0]
        if new in mapping:
            said.append(f"{key}: removed, {new} stands there too")
            return _commented(text)
        said.append(f"{key}: now {new}")
        return text.replace(key, new, 1)
    if key in RENAMED:
        said.append(f"{key}: removed. {RENAMED[key][1]}")
        return _commented(text)
    if isinstance(value, bool) and key in recipe.key_types() and re.match(rf"{key}\s*:\s*(no|off)\b", text, re.I):
        takes = accepted_types(recipe.key_types()[key])
        if str in takes and bool not in takes:
            said.append(f"{key}: quoted, YAML takes {value} for a truth value")
            return re.sub(r":\s*(no|off)\b", ': "no"', text, count=1, flags=re.I)
    return text


def _from_mixer(text: str, mapping: dict[str, Any], said: list[str]) -> str:
    """alignment-handbook's `dataset_mixer` and `dataset_splits` as TRL's dataset_name or datasets."""
    mixer, splits = mapping["dataset_mixer"], mapping.get("dataset_splits") or []
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
            said.append("datasets: a mixture has no test split of its own; set test_split_size for evaluation")
    said.append(f"dataset_mixer: now {', '.join(new)}")
    comments = "".join(line for line in text.splitlines(keepends=True) if line.lstrip().startswith("#"))
    return comments + yaml.safe_dump(new, sort_keys=False)


def _comment(text: str) -> str:
    found = re.search(r"\s+#.*$", text.splitlines()[0])
    return found[0] if found else ""


def _commented(text: str) -> str:
    return "".join(f"# {line}" for line in text.splitlines(keepends=True))
