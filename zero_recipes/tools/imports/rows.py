"""One key of another trainer by its row of a table in config/imports, whose first lines explain a row's fields."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from zero_recipes.tools.imports.draft import REMARKS, Draft
from zero_recipes.tools.imports.models import table

LONGEST_VALUE = 80  # characters of another trainer's value in a remark


def translate(draft: Draft, key: str) -> None:
    """Carry a key, or its default, as its row of the table says; and say what the recipe lacks of it."""
    value = draft.theirs.get(key)
    row = _row_of(draft, key)
    place = key
    why = key
    if value is None:
        value = row.get("default")
        place = None
        why = f"{draft.source}'s default"
    is_unset = value is None or (row.get("zero_is_unset") and not value)
    if is_unset or not _applies(draft, row):
        return

    if "only" in row:
        row = row | {"values": {one: {row["to"]: one} for one in row["only"]}}
    if "values" in row:
        _put_by_value(draft, key, place, value, why, row)
    elif "to" in row:
        if row.get("list") and isinstance(value, str):
            value = [value]
        draft.put(place, why, **{row["to"]: value}, **row.get("sets", {}))
    elif "within" in row and value:
        [(outer, inner)] = row["within"].items()
        draft.put(place, why, **{outer: {inner: value}}, **row["sets"])

    if value not in (False, 0, "", [], {}):
        draft.add_remarks(key, row)


def _row_of(draft: Draft, key: str) -> Mapping[str, Any]:
    rows = table(draft.source)["keys"]
    row = rows[key] if key in rows else pattern_row(draft, key)
    if row is None:
        return _unknown(draft.theirs[key])
    return {"to": row} if isinstance(row, str) else row


def pattern_row(draft: Draft, key: str) -> Mapping[str, Any] | None:
    """The row of the table's first pattern that the key fits, e.g. `ref_model*`."""
    for name, row in table(draft.source)["keys"].items():
        if "*" in name and fnmatchcase(key, name):
            return row
    return None


def _unknown(value: Any) -> dict[str, str]:
    shown = repr(value)
    if len(shown) > LONGEST_VALUE:
        shown = f"{shown[:LONGEST_VALUE]}..."
    return {"changes": f"this key is unknown to zero-recipes (value {shown})"}


def _applies(draft: Draft, row: Mapping[str, Any]) -> bool:
    """Whether the key that this one `needs` is set, to one `of` the values if named, and the one in `unless` is not."""
    if draft.theirs.get(row.get("unless")):
        return False
    if "needs" not in row:
        return True
    other = table(draft.source)["keys"].get(row["needs"])
    default = other.get("default") if isinstance(other, dict) else None
    needed = draft.theirs.get(row["needs"], default)
    return bool(needed) and needed in row.get("of", [needed])


def _put_by_value(draft: Draft, key: str, place: str | None, value: Any, why: str, row: Mapping[str, Any]) -> None:
    values = row["values"]
    otherwise = row.get("otherwise")
    for one in value if isinstance(value, list) else [value]:
        name = str(one).lower() if isinstance(one, bool) else one
        if name in values:
            draft.add_remarks(f"{key}: {name}", values[name])
            draft.put(place, why, **{new: text for new, text in values[name].items() if new not in REMARKS})
        elif otherwise is not None:
            draft.changes(key, otherwise)
        else:
            draft.changes(key, f"the value {one!r} is unknown, and the recipe's default is used")


def remark_nested(draft: Draft, place: str, keys: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Say what the keys in a mapping of the file mean that no code reads. `rows`: {key: its row}."""
    for key, value in keys.items():
        row = rows.get(key, _unknown(value))
        if "code" in row or value in (None, False, "", [], {}):
            continue
        ours = [one for one in (value if isinstance(value, list) else [value]) if not _is_among(one, row)]
        if ours:
            draft.add_remarks(f"{place}.{key}", row)


def _is_among(value: Any, row: Mapping[str, Any]) -> bool:
    """Whether the row names this value as one that means the same in a recipe."""
    return value in row.get("same", ())
