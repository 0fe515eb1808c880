"""Checks of the recipe's own text: keys of other times and places, values that YAML or TRL would mistake."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator
from typing import Any

from zero_recipes.config.other_trainers import ported
from zero_recipes.config.value_limits import foreign_findings, limit_findings
from zero_recipes.core.findings import Finding, described, finding, ignored_codes, near_codes, table

# keys that former versions of TRL and transformers took: what to write today, and a note where it is not the same
RENAMED = {
    "torch_dtype": ("dtype", ""),
    "max_seq_length": ("max_length", ""),
    "evaluation_strategy": ("eval_strategy", ""),
    "warmup_ratio": ("warmup_steps", "A number below 1 is a share of all steps."),
    "overwrite_output_dir": (
        "",
        "Remove it: it never deleted anything, it only let a run write into a folder that was not empty. (`overwrite: "
        "true` is another key: it deletes what an earlier run left in output_dir.)",
    ),
    "no_cuda": ("use_cpu", ""),
    "num_proc": ("dataset_num_proc", ""),
    "preprocessing_num_workers": ("dataset_num_proc", ""),
    "use_flash_attention_2": ("attn_implementation", ""),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", ""),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", ""),
    "group_by_length": ("train_sampling_strategy", ""),
    "push_to_hub_model_id": ("hub_model_id", ""),
    "hub_model_revision": ("hub_revision", ""),
    "use_liger": ("use_liger_kernel", ""),
    "dataset_mixer": ("datasets", "TRL's list of `path:` entries replaces the mapping of names to fractions."),
    "dataset_mixture": ("datasets", "TRL's list of `path:` entries, with `name:` and `fraction:`."),
    "chat_template": ("chat_template_path", "It names a file with the template."),
    "adafactor": ("optim", ""),
    "include_tokens_per_second": ("", "metrics.json always has tokens per second."),
    "save_safetensors": ("", "Models are always saved as safetensors."),
    "logging_dir": ("", "Set the environment variable TENSORBOARD_LOGGING_DIR in the recipe's `env:` block."),
}
# of these, switches that became a value of another key: what `true` is written as today (`false` says nothing)
SWITCHES = {
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "adafactor": "optim: adafactor",
}
# still taken, under a name that transformers deprecates
DEPRECATED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# sample_prompts takes a number, a path or a list; resume_from_checkpoint is typed as text, but `true` is meant too;
# validating a ParallelismConfig makes one, which reads the environment
UNTYPED = {"sample_prompts", "resume_from_checkpoint", "fsdp", "parallelism_config"}
MOST_UNKNOWN = 20  # keys that are named one by one: names that are near are looked for, which takes time
# keys that people put into a recipe although the launcher owns them, beside accelerate's own (ClusterConfig)
LAUNCH_KEYS = {"accelerate_config", "config_file", "num_gpus", "nproc_per_node", "launcher", "hostfile"}
LAUNCH_COMMAND = (
    "accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 run_sft.py RECIPE.yaml"
)


def recipe_findings(
    place: str, mapping: dict[str, Any], lines: dict[str, int], types: dict[str, Any], choices: dict[str, list[str]]
) -> list[Finding]:
    """All findings about one recipe.

    `lines`: {key: line in the file}; `types`: {known key: its type hint}; `choices`: {key: the only values it takes}.
    """
    found: list[Finding] = []
    for key in (key for key in mapping if key in types):
        where, value = f"{place}:{lines[key]}" if key in lines else place, mapping[key]
        here = [*value_findings(where, key, value, types[key])] or [*foreign_findings(where, key, value)]
        here = here or ([*_entry_findings(where, value)] if key == "datasets" else [])
        here = here or [*_choice_findings(where, key, value, choices.get(key)), *limit_findings(where, key, value)]
        here += [_deprecated(key, place)] if key in DEPRECATED else []
        found += [dataclasses.replace(finding, key=key) for finding in here]
    return found + list(key_findings(place, [key for key in mapping if key not in types], types, lines))


def key_findings(
    place: str, unknown: list[str], known: typing.Iterable[str], lines: dict[str, int] | None = None
) -> Iterator[Finding]:
    """One finding for each unknown key: renamed, the launcher's, or misspelt."""
    from accelerate.commands.config.config_args import ClusterConfig

    launch = LAUNCH_KEYS | {f.name for f in dataclasses.fields(ClusterConfig)}
    nameless = [key for key in unknown if key not in RENAMED and key not in launch and ported(key) is None]
    left_out = set(nameless[MOST_UNKNOWN:])
    for key in (key for key in unknown if key not in left_out):
        where = f"{place}:{lines[key]}" if lines and key in lines else place
        if key in RENAMED:
            name, note = RENAMED[key]
            fix = f"Write `{SWITCHES.get(key, name)}`; zero-recipes check --upgrade does it. {note}" if name else note
            yield finding(
                "ZR101",
                key=key,
                where=where,
                why=f"; it is `{name}` now." if name else ".",
                fix=fix.strip(),
                recipe_key=key,
            )
        elif key in launch:
            yield finding("ZR102", key=key, where=where, launch_command=LAUNCH_COMMAND, recipe_key=key)
        elif (other := ported(key)) is not None:
            trainer, name, fix = other
            yield finding(
                "ZR187",
                key=key,
                where=where,
                trainer=trainer,
                why=f"; there it is `{name}`." if name else ".",
                fix=fix,
                recipe_key=key,
            )
        else:
            near = difflib.get_close_matches(key, list(known), 2, 0.7)
            yield finding(
                "ZR103",
                key=key,
                where=where,
                fix=f"Did you mean {' or '.join(f'`{name}`' for name in near)}?"
                if near
                else "Remove it, or see the table of keys in docs/recipe.md.",
                recipe_key=key,
            )
    if left_out:
        yield finding("ZR154", number_of_nameless=len(nameless) - MOST_UNKNOWN, place=place, most_unknown=MOST_UNKNOWN)


def _entry_findings(where: str, entries: Any) -> Iterator[Finding]:
    """Entries of `datasets` with keys that TRL's DatasetConfig does not have: its constructor names neither place."""
    from trl.scripts.utils import DatasetConfig

    known = [field.name for field in dataclasses.fields(DatasetConfig)]
    found = {key: None for entry in entries or [] if isinstance(entry, dict) for key in entry if key not in known}
    for key in found:
        near = difflib.get_close_matches(str(key), known, 1, 0.7)
        alpaca = "`type: alpaca` of axolotl is `dataset_format: alpaca` of the whole recipe. " if key == "type" else ""
        yield finding(
            "ZR189",
            where=where,
            key=key,
            known=", ".join(known),
            fix=f"Did you mean `{near[0]}`?" if near else f"{alpaca}Remove `{key}`.",
        )


def _deprecated(key: str, place: str) -> Finding:
    return finding("ZR104", key=key, place=place, deprecated=DEPRECATED[key])


def value_findings(where: str, key: str, value: Any, hint: Any) -> Iterator[Finding]:
    """At most one finding: a value that the key cannot mean, by pydantic and TRL's own type hint."""
    errors = [] if key in UNTYPED else _type_errors(value, hint)
    if not errors:
        return
    takes = accepted_types(hint)
    what = f"`{key}` in {where} is"
    why = f"It takes {_named(takes)}."
    if value is None:
        if takes <= {"boolean", "integer", "number"}:
            yield finding("ZR105", what=what, why=why)
    elif key == "datasets":
        yield finding("ZR108", where=where)
    elif isinstance(value, bool) and "string" in takes:
        yield finding("ZR106", what=what, value=str(value).lower(), key=key, fix="no" if value is False else "yes")
    elif isinstance(value, bool):
        yield finding("ZR107", what=what, value=str(value).lower(), why=why)
    elif isinstance(value, list) and "array" not in takes:
        yield finding("ZR109", what=what, value=value, why=why)
    elif isinstance(value, dict) and "object" not in takes:
        yield finding("ZR110", what=what, why=why)
    elif isinstance(value, (list, dict)):
        inner = next(error for error in errors if error["input"] is not value)
        yield finding("ZR141", key=key, where=where, input=inner["input"], msg=inner["msg"])
    elif isinstance(value, str):
        if not takes & {"array", "object"}:  # TRL's parser makes lists and mappings of text
            yield finding("ZR112", what=what, value=value, why=why, named=_named(takes))
    else:
        yield finding(
            "ZR111",
            what=what,
            what_2="number" if isinstance(value, (int, float)) else type(value).__name__,
            value=value,
            why=why,
            fix=f'Quote it if it is meant as text: {key}: "{value}"'
            if "string" in takes
            else f"Write {_named(takes)}.",
        )


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


def _choice_findings(where: str, key: str, value: Any, choices: list[str] | None) -> Iterator[Finding]:
    if choices and isinstance(value, str) and value not in choices:
        near = difflib.get_close_matches(value, choices, 2, 0.5)
        yield finding(
            "ZR114",
            key=key,
            where=where,
            value=value,
            choices=", ".join(choices),
            fix=f"Did you mean {' or '.join(near)}?" if near else "Write one of them.",
        )


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


def _named(takes: set[str]) -> str:
    words = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "array": "a list",
        "object": "a mapping",
    }
    return " or ".join(words[kind] for kind in words if kind in takes)


def ignore_findings(ignore: list[str] | str | None) -> list[Finding]:
    """One finding for each code under `ignore` that is unknown, or stands for an error that no run can go on with."""
    found = []
    for code in sorted(ignored_codes(ignore)):
        if code not in table():
            near = near_codes(code)
            fix = f"Did you mean {' or '.join(near)}?" if near else "zero-recipes explain lists the areas of codes."
            found.append(finding("ZR142", code_name=code, fix=fix))
        elif table()[code]["level"] != "warning" and "ignore" not in table()[code]:
            found.append(finding("ZR143", code_name=code, what=described(code)["what"]))
    return found
