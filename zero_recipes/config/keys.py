"""The keys that a recipe may have, TRL's and ours, and what is wrong with a key or its value.

Tables that people edit are in keys.yaml: names of other versions and trainers, and the range of each number.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from zero_recipes.config.recipe_arguments import RecipeArguments
from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import Finding, described, finding, ignored_codes, table

# of an entry of `datasets`, besides TRL's; its `columns` may be a mapping
ENTRY_KEYS = {"weight": float | None, "dataset_format": str | None}

tables = partial(package_yaml, __package__, "keys.yaml")
# readers of the datasets library by the ends of a file's name
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


def dataclasses_of_a_recipe() -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe: TRL's, then ours."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    return ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RecipeArguments


@cache
def key_types() -> Mapping[str, Any]:
    """The type hint of every key that a recipe may have, by its name."""
    types: dict[str, Any] = {}
    for cls in dataclasses_of_a_recipe():
        hints = typing.get_type_hints(cls)
        types |= {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    types["datasets"] = list[_entry_type()]
    return MappingProxyType(types)


def _entry_type() -> type:
    """An entry of `datasets`: TRL's, with keys of ours."""
    from trl.scripts.utils import DatasetConfig

    own = [(key, hint, None) for key, hint in ENTRY_KEYS.items()]
    own.append(("columns", list[str] | dict[str, str] | None, None))
    return dataclasses.make_dataclass("DatasetEntry", own, bases=(DatasetConfig,))


@cache
def key_choices() -> Mapping[str, list[str]]:
    """The only values of each key that does not take others, by its name."""
    choices = {}
    for cls in dataclasses_of_a_recipe():
        for field in dataclasses.fields(cls):
            if field.metadata.get("choices"):
                choices[field.name] = list(field.metadata["choices"])
    return MappingProxyType(choices)


# sample_prompts takes a number, a path or a list; resume_from_checkpoint is typed as text, but `true` is meant too;
# validating a ParallelismConfig makes one, which reads the environment
UNTYPED = {"sample_prompts", "resume_from_checkpoint", "fsdp", "parallelism_config"}
UNTYPED_LISTS = {"sample_prompts", "fsdp"}


def recipe_findings(
    place: str, mapping: Mapping[str, Any], lines: Mapping[str, int], types: Mapping[str, Any]
) -> list[Finding]:
    """Findings of a recipe's file: at most one error for each of its keys.

    Args:
        place: the file's path.
        lines: the line of each key.
        types: what `key_types` gives.
    """
    choices = key_choices()
    deprecated = tables()["deprecated"]
    findings = []
    unknown = []
    for key, value in mapping.items():
        if key not in types:
            unknown.append(key)
            continue
        where = _place_of(key, place, lines)
        of_key = list(value_findings(where, key, value, types[key], choices.get(key, ())))
        if key in deprecated:
            of_key.append(finding("ZR104", key=key, place=place, deprecated=deprecated[key]))
        findings += [dataclasses.replace(one, key=key) for one in of_key]
    return [*findings, *key_findings(place, unknown, types, lines)]


def _place_of(key: str, place: str, lines: Mapping[str, int]) -> str:
    return f"{place}:{lines[key]}" if key in lines else place


def key_findings(
    place: str, unknown: list[str], known: Iterable[str], lines: Mapping[str, int] | None = None
) -> Iterator[Finding]:
    """A finding for each key that no recipe has: what it is called here, or whose key it is.

    `place`: where it stands, as a file's path. `lines`: the line of each key in it.
    """
    from accelerate.commands.config.config_args import ClusterConfig

    renamed = tables()["renamed"]
    launcher = {field.name for field in dataclasses.fields(ClusterConfig)}
    launcher.update(tables()["launcher"])
    others = tables()["other_trainers"]
    for key in unknown:
        trainers = [trainer for trainer in others if key in others[trainer]]
        about = {"key": key, "where": _place_of(key, place, lines or {}), "recipe_key": key}
        if key in renamed:
            yield finding("ZR101", **about, fix=_instead(renamed[key]))
        elif key in launcher:
            yield finding("ZR102", **about)
        elif trainers:
            row = others[trainers[0]][key]
            yield finding("ZR187", **about, trainer=trainers[0], fix=_instead(row))
        else:
            fix = _did_you_mean(key, known) or "Remove it, or see the table of keys in docs/recipe.md."
            yield finding("ZR103", **about, fix=fix)


def _instead(row: Mapping[str, str]) -> str:
    """`row`: of the key in keys.yaml."""
    note = row.get("note", "")
    if "to" not in row:
        return note
    written = row.get("switch", row["to"])
    return f"Write `{written}`. {note}".strip()


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(str(name), known, 2, 0.7)
    if not near:
        return None
    named = "` or `".join(near)
    return f"Did you mean `{named}`?"


def value_findings(where: str, key: str, value: Any, hint: Any, choices: Sequence[str] = ()) -> Iterator[Finding]:
    """At most one finding of a value: about its type, else its range, else its choices."""
    converted, errors = (value, []) if key in UNTYPED else _validated(value, hint)
    found = [*_type_findings(where, key, value, hint, errors)] or [*range_findings(where, key, converted)]
    yield from found
    if not found and choices and isinstance(value, str) and value not in choices:
        fix = _did_you_mean(value, choices) or "Write one of them."
        yield finding("ZR114", key=key, where=where, value=value, choices=", ".join(choices), fix=fix)


def _type_findings(where: str, key: str, value: Any, hint: Any, errors: list[dict[str, Any]]) -> Iterator[Finding]:
    """A finding where pydantic has errors about what TRL's parser would not read as meant either."""
    if not errors:
        return
    types = accepted_types(hint)
    if value is None and not types <= {"boolean", "integer", "number"}:
        return  # TRL's dataclasses have None where they do not say so
    if isinstance(value, str) and types & {"array", "object"} and key != "datasets":
        return  # TRL's parser makes lists and mappings of other texts
    if isinstance(value, (int, float)) and not isinstance(value, bool) and types <= {"string", "null"}:
        return  # taken as text
    if isinstance(value, bool) and "string" in types:
        written = "yes" if value else "no"
        yield finding("ZR106", key=key, where=where, value=str(value).lower(), written=written)
        return
    messages = dict.fromkeys(error["msg"] for error in errors)
    yield finding("ZR107", key=key, where=where, value=repr(value)[:80], messages="; ".join(messages))


def _validated(value: Any, hint: Any) -> tuple[Any, list[dict[str, Any]]]:
    """(the value as pydantic converts it to TRL's own type hint, else as it is; pydantic's errors)."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError  # here: recipes are read before torch

    is_plain = isinstance(value, (bool, int, float))  # these strictly, or 1 would be taken for true and true for 1
    try:
        return TypeAdapter(hint).validate_python(value, strict=is_plain), []
    except ValidationError as error:
        return value, error.errors(include_url=False)
    except PydanticUserError:  # a hint that it does not know
        return value, []


def range_findings(where: str, key: str, value: Any) -> Iterator[Finding]:
    """A finding of a number outside its range in keys.yaml, or of one that is none (NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    rows = (row for row in tables()["ranges"] if key in row["keys"])
    allowed = next(rows, {})
    low = allowed.get("min", -math.inf)
    high = allowed.get("max", math.inf)
    if low <= value <= high:
        return
    words = {"min": "at least", "max": "at most"}
    shown = " and ".join(f"{words[end]} {allowed[end]:,}" for end in words if end in allowed) or "a number"
    yield finding("ZR113", key=key, where=where, value=value, allowed=shown)


def accepted_types(hint: Any) -> set[str]:
    """The types that a key takes, by JSON's names, as {"string", "null"}; {"any"} where pydantic does not know."""
    from pydantic import PydanticUserError, TypeAdapter

    try:
        schema = TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return {"any"}
    types = set()
    for part in schema.get("anyOf", [schema]):
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        types.add(part.get("type", "any"))
    return types


def takes_lists(key: str, hint: Any) -> bool:
    """Whether a value of the key may be a list."""
    return key in UNTYPED_LISTS or "array" in accepted_types(hint)


def ignore_findings(ignore: list[str] | str | None) -> Iterator[Finding]:
    """A finding for each code in a recipe's `ignore` that does not exist, or that cannot be ignored."""
    rows: Mapping[str, Any] = table()
    for code in sorted(ignored_codes(ignore)):
        if code not in rows:
            near = difflib.get_close_matches(code, rows)
            yield finding("ZR142", unknown=code, near=", ".join(near) or "none")
        elif rows[code]["level"] != "warning" and "ignore" not in rows[code]:
            yield finding("ZR143", ignored=code, what=described(code)["what"])
