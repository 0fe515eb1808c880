"""The keys that a recipe may have: TRL's and ours, with their types and choices. Tables about them: keys.yaml."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import Finding, described, finding, ignored_codes, table

# readers of the datasets library by the ends of a file's name
FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
ENTRY_KEYS = ("weight", "dataset_format")  # of an entry of `datasets`, besides TRL's; its `columns` may be a mapping

tables = partial(package_yaml, __package__, "keys.yaml")


@dataclass
class RecipeArguments:
    """The keys that TRL does not have. keys.yaml says what each means, for docs/recipe.md."""

    dataset_format: str | None = None
    columns: dict | str | None = None
    mixture_stopping_strategy: str = "first_exhausted"
    assistant_mask: str | None = None
    long_rows: str = "cut"
    global_batch_size: int | None = None
    sample_prompts: str | None = None
    sample_max_new_tokens: int = 128
    sequence_parallel_size: int = 1
    random_weights: bool = False
    allow_keys: list[str] | None = None
    peft_config: dict | str | None = None
    loraplus_lr_ratio: float | None = None
    save_model: bool = True
    save_on_signal: bool = True
    stop_after_nonfinite_steps: int = 3
    token_metrics: str = "logging_steps"
    supervised_logits_only: bool = False
    nvme_path: str | None = None
    ignore: list[str] | None = None
    overwrite: bool = False
    skip_checksums: bool = False
    trust_checkpoint: bool = False
    predict: bool = False
    skip_plan: bool = False


for _own in dataclasses.fields(RecipeArguments):
    _own.metadata = tables()["own"][_own.name]


def dataclasses_of_a_recipe() -> tuple[type, ...]:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    return ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RecipeArguments


def key_types() -> dict[str, Any]:
    """{every key that a recipe may have: its type hint}."""
    hints: dict[str, Any] = {}
    for cls in dataclasses_of_a_recipe():
        resolved = typing.get_type_hints(cls)
        hints |= {f.name: resolved[f.name] for f in dataclasses.fields(cls) if f.init}
    return hints | {"datasets": list[_entry_type()]}


def _entry_type() -> type:
    """An entry of `datasets`: TRL's, with keys of ours."""
    from trl.scripts.utils import DatasetConfig

    own = [(key, float | None if key == "weight" else str | None, None) for key in ENTRY_KEYS]
    own.append(("columns", list[str] | dict[str, str] | None, None))
    return dataclasses.make_dataclass("DatasetEntry", own, bases=(DatasetConfig,))


def key_choices() -> dict[str, list[str]]:
    """{key: the only values that it takes}, for keys that say so in their help; of enumerations TRL's classes do."""
    fields = (field for cls in dataclasses_of_a_recipe() for field in dataclasses.fields(cls))
    return {field.name: list(field.metadata["choices"]) for field in fields if field.metadata.get("choices")}


# sample_prompts takes a number, a path or a list; resume_from_checkpoint is typed as text, but `true` is meant too;
# validating a ParallelismConfig makes one, which reads the environment
UNTYPED = {"sample_prompts", "resume_from_checkpoint", "fsdp", "parallelism_config"}


def recipe_findings(place: str, mapping: dict[str, Any], lines: dict[str, int]) -> list[Finding]:
    """All findings about one recipe. `lines`: in the file, by key."""
    found, types, choices = [], key_types(), key_choices()
    for key in (key for key in mapping if key in types):
        where, value = f"{place}:{lines[key]}" if key in lines else place, mapping[key]
        here = [*value_findings(where, key, value, types[key])]
        here = here or [*range_findings(where, key, value)]
        if not here and key in choices and isinstance(value, str) and value not in choices[key]:
            fix, listed = _did_you_mean(value, choices[key]) or "Write one of them.", ", ".join(choices[key])
            here = [finding("ZR114", key=key, where=where, value=value, choices=listed, fix=fix)]
        if key in tables()["deprecated"]:
            here.append(finding("ZR104", key=key, place=place, deprecated=tables()["deprecated"][key]))
        found += [dataclasses.replace(finding, key=key) for finding in here]
    return found + list(key_findings(place, [key for key in mapping if key not in types], types, lines))


def key_findings(
    place: str, unknown: list[str], known: Iterable[str], lines: dict[str, int] | None = None
) -> Iterator[Finding]:
    """One finding for each unknown key: renamed, the launcher's, another trainer's, or misspelt."""
    from accelerate.commands.config.config_args import ClusterConfig

    renamed = tables()["renamed"]
    launcher = {*tables()["launcher"], *(field.name for field in dataclasses.fields(ClusterConfig))}
    for key in unknown:
        where = f"{place}:{lines[key]}" if lines and key in lines else place
        if key in renamed:
            today, note = renamed[key].get("to"), renamed[key].get("note", "")
            written = renamed[key].get("switch", today)
            fix = f"Write `{written}`. {note}" if today else note
            yield finding("ZR101", key=key, where=where, fix=fix.strip(), recipe_key=key)
        elif key in launcher:
            yield finding("ZR102", key=key, where=where, recipe_key=key)
        elif trainer := next((trainer for trainer, rows in tables()["other_trainers"].items() if key in rows), None):
            today, note = (tables()["other_trainers"][trainer][key].get(part) for part in ("to", "note"))
            fix = " ".join(filter(None, (f"Write `{today}`." if today else None, note)))
            yield finding("ZR187", key=key, where=where, trainer=trainer, fix=fix, recipe_key=key)
        else:
            fix = _did_you_mean(key, known) or "Remove it, or see the table of keys in docs/recipe.md."
            yield finding("ZR103", key=key, where=where, fix=fix, recipe_key=key)


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(str(name), list(known), 2, 0.7)
    return f"Did you mean {' or '.join(f'`{other}`' for other in near)}?" if near else None


def value_findings(where: str, key: str, value: Any, hint: Any) -> Iterator[Finding]:
    """At most one finding: a value that the key cannot mean, by pydantic and TRL's own type hint."""
    errors = [] if key in UNTYPED else _type_errors(value, hint)
    takes = accepted_types(hint) if errors else set()
    if not errors or (value is None and not takes <= {"boolean", "integer", "number"}):
        return  # TRL's dataclasses have None where they do not say so
    if isinstance(value, str) and takes & {"array", "object"} and key != "datasets":
        return  # TRL's parser makes lists and mappings of other texts
    if isinstance(value, (int, float)) and not isinstance(value, bool) and takes <= {"string", "null"}:
        return  # taken as text
    if isinstance(value, bool) and "string" in takes:
        written = "yes" if value else "no"
        yield finding("ZR106", key=key, where=where, value=str(value).lower(), written=written)
    else:
        messages = "; ".join(dict.fromkeys(error["msg"] for error in errors))
        yield finding("ZR107", key=key, where=where, value=repr(value)[:80], messages=messages)


def _type_errors(value: Any, hint: Any) -> list[dict[str, Any]]:
    """pydantic's errors: "type", "loc", "msg", "input". None for a hint that pydantic does not know."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError  # here: recipes are read before torch

    plain = isinstance(value, (bool, int, float))  # these strictly, or 1 would be taken for true and true for 1
    try:
        TypeAdapter(hint).validate_python(value, strict=plain)
    except ValidationError as error:
        return error.errors(include_url=False)
    except PydanticUserError:
        pass
    return []


def range_findings(where: str, key: str, value: Any) -> Iterator[Finding]:
    """At most one finding: a number out of the key's range in keys.yaml, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    allowed = next((row for row in tables()["ranges"] if key in row["keys"]), {})
    low, high = allowed.get("min", -float("inf")), allowed.get("max", float("inf"))
    if not low <= value <= high:
        words = [f"at least {low:,}"] if "min" in allowed else []
        words += [f"at most {high:,}"] if "max" in allowed else []
        yield finding("ZR113", key=key, where=where, value=value, allowed=" and ".join(words) or "a number")


def accepted_types(hint: Any) -> set[str]:
    """JSON's names of the types that a key takes: {"string", "null"}. {"any"} for a hint unknown to pydantic."""
    from pydantic import PydanticUserError, TypeAdapter

    try:
        schema = TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return {"any"}
    parts = schema.get("anyOf", [schema])
    named = [schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part for part in parts]
    return {part.get("type", "any") for part in named}


def ignore_findings(ignore: list[str] | str | None) -> Iterator[Finding]:
    """One finding for each code under `ignore` that is unknown, or is of an error that no run can go on with."""
    rows: Mapping[str, Any] = table()
    for code in sorted(ignored_codes(ignore)):
        if code not in rows:
            yield finding("ZR142", unknown=code, near=", ".join(difflib.get_close_matches(code, rows)) or "none")
        elif rows[code]["level"] != "warning" and "ignore" not in rows[code]:
            yield finding("ZR143", ignored=code, what=described(code)["what"])
