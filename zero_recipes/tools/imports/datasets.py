"""An imported recipe's `datasets`: their files, columns and speakers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_recipes.config.keys import FORMATS
from zero_recipes.core.files import package_yaml
from zero_recipes.tools.imports.draft import Draft


def entry_of(path: str, columns: Mapping[str, str | None], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Make an entry of `datasets`. `columns`: {ours: theirs}; `theirs`: keys that keep their names."""
    kind = FORMATS.get(Path(path).suffix)
    entry = {"path": kind, "data_files": path} if kind else {"path": path}
    for new, old in columns.items():
        if old not in (None, new):
            entry.setdefault("columns", {})[new] = old
    for key in ("name", "split", "data_files"):
        if theirs.get(key):
            entry[key] = theirs[key]
    return entry


def message_columns(mappings: Mapping[str, str | None]) -> dict[str, str]:
    """The keys of a message, as an entry's `columns` have them. `mappings`: {ours: theirs}.

    Where nothing is renamed none is needed. Where one is, all stand there: rows may have both names.
    """
    named = {key: theirs for key, theirs in mappings.items() if theirs is not None}
    if all(key == theirs for key, theirs in named.items()):
        return {}
    return {f"messages.{key}": theirs for key, theirs in named.items()}


def remark_other_roles(draft: Draft, key: str, roles: Mapping[str, str | list[str] | None]) -> None:
    """Say which names of speakers zero-recipes does not take for their role.

    `key`: of the other trainer. `roles`: {role: names}.
    """
    known = package_yaml("zero_recipes.data", "forms.yaml")["roles"]
    for role, names in roles.items():
        for name in [names] if isinstance(names, str) else names or []:
            if known.get(name.lower()) != role:
                draft.changes(key, f"rows with the speaker {name!r} are refused, or are another's turn")
