"""Read a recipe: the file and the command line become one Recipe, and every wrong key or value one finding.

A key is checked once, where it stands: its name, its type, its range and its choices. A wrong one is left out, and the
rest goes on, so that all findings come at once.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from zero_recipes.config import keys
from zero_recipes.config.accelerate import LAUNCH_KEYS, launch_key_findings
from zero_recipes.config.command_line import USAGE, Override, key_of, recipe_key, split_overrides
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.files import FILES, at_hand
from zero_recipes.core.findings import Finding, Refusal, collected, finding, raise_errors, refusal
from zero_recipes.core.library_errors import library_error_as_finding

COMMAND_LINE = "the command line"  # as the place of a finding
# mappings, which the command line gives as JSON
MAPPINGS = (
    "model_init_kwargs",
    "dataset_kwargs",
    "lr_scheduler_kwargs",
    "liger_kernel_config",
    "accelerator_config",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "columns",
    "peft_config",
)
# mappings with numbers in them
NUMBER_MAPPINGS = (
    "model_init_kwargs",
    "dataset_kwargs",
    "lr_scheduler_kwargs",
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "peft_config",
)
# Parts of keys in them, as of `base_model_name_or_path`, whose texts are never numbers: a commit may be 12e4567.
TEXT_PARTS = {
    "revision",
    "commit",
    "name",
    "path",
    "dir",
    "folder",
    "subfolder",
    "file",
    "id",
    "token",
    "variant",
    "code",
    "prefix",
    "suffix",
    "modules",
    "parameters",
    "pattern",
    "layers",
    "cls",
    "project",
    "team",
    "group",
    "host",
    "tag",
}
EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


class ReadRecipe(NamedTuple):
    """What file and command line say, without what is wrong in them."""

    recipe: Recipe
    findings: list[Finding]
    wrong_keys: frozenset[str]  # that have an error


def read_recipe(
    path: Path, mapping: Mapping[str, Any], overrides: Sequence[str], environment: Mapping[str, str]
) -> ReadRecipe:
    """Merge a recipe's file with the command line, and compare its launch with the launcher's. Raises nothing.

    Args:
        path: the recipe's file; its bytes are hashed.
        mapping: what `read_recipe_file` made of it.
        overrides: the words of the command line after the recipe.
        environment: the launcher's variables.
    """
    findings: list[Finding] = []
    with collected(findings):
        findings += launch_key_findings(path, mapping, environment)
    recipe, of_keys = _merged(path, mapping, overrides)
    wrong = frozenset(found.key for found in of_keys if found.level == "error" and found.key)
    return ReadRecipe(recipe, [*findings, *of_keys], wrong)


def parse_recipe(path: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Merge a recipe's file with the command line, whatever launches it.

    Args: as of `read_recipe`. Raises Refusal with every wrong key and value.
    """
    recipe, findings = _merged(path, mapping, overrides)
    raise_errors(findings)
    return recipe


def _merged(path: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Recipe, list[Finding]]:
    """The recipe of all sound keys, and what is wrong with the others."""
    known = keys.key_types()
    in_file = {key: value for key, value in mapping.items() if key not in LAUNCH_KEYS}
    findings = keys.recipe_findings(str(path), in_file, getattr(mapping, "lines", {}), known)
    wrong = {found.key for found in findings if found.level == "error"}
    in_file = {key: value for key, value in in_file.items() if key in known and key not in wrong}
    values = _values_of_file(in_file, known, findings)
    typed = _values_of_command_line(overrides, values, known, findings)
    explicit_keys = in_file.keys() | typed.keys()
    values = converted(values | typed)
    explicit = {key: value for key, value in values.items() if key in explicit_keys}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    recipe = Recipe(path=path, settings=Settings(values), explicit=MappingProxyType(explicit), sha256=digest)
    return recipe, findings


def _parser(defaults: Mapping[str, Any]) -> argparse.ArgumentParser:
    """TRL's parser of all keys. Abbreviations (`--max_step`) would hide a misspelt key."""
    from trl import TrlParser

    classes = keys.dataclasses_of_a_recipe()
    parser = TrlParser(dataclass_types=classes, allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.set_defaults_with_config(**defaults)
    return parser


def _values_of_file(in_file: dict[str, Any], known: Mapping[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """The value of every key without the command line. What the parser cannot read is taken out of `in_file`."""
    defaults = {key: _as_text(value, known[key]) for key, value in in_file.items()}
    # a list, a number or a path: argparse has one type a key
    sample_prompts = defaults.pop("sample_prompts", None)
    try:
        values, _ = _parser(defaults).parse_known_args([])
    except argparse.ArgumentError as error:
        wrong = _wrong_value(error)
        findings.append(wrong)
        del in_file[wrong.key]  # the key of one of its texts: nothing is typed yet
        return _values_of_file(in_file, known, findings)
    return vars(values) | {"sample_prompts": sample_prompts}


def _values_of_command_line(
    words: Sequence[str], values: Mapping[str, Any], known: Mapping[str, Any], findings: list[Finding]
) -> dict[str, Any]:
    """{key: value} of the keys that the command line names; the last one counts. `values`: of the file."""
    parser = _parser({})
    typed: dict[str, Any] = {}
    for override in split_overrides(words):
        key = recipe_key(override.key, known)
        found: list[Finding] = []
        with collected(found):
            typed[key] = _typed_value(override, key, parser, values, known)
        findings += [dataclasses.replace(one, key=one.key or key) for one in found]
    return typed


def _typed_value(
    override: Override, key: str, parser: argparse.ArgumentParser, values: Mapping[str, Any], known: Mapping[str, Any]
) -> Any:
    """The value of one override. Raises Refusal.

    `--max_length null` unsets a key that may be null. `--sample_metrics '[exact_match, rouge]'` gives a list as a
    recipe writes it: the parser would take it for one name.
    """
    text = override.text
    if text is not None and override.key in known:
        if _is_null(key, text, known[key]):
            return None
        if _is_list(key, text, known[key]):
            with library_error_as_finding(f"reading --{key}"):
                listed = yaml.safe_load(text)
            raise_errors(list(keys.value_findings(COMMAND_LINE, key, listed, known[key])))
            return listed
    try:
        read, surplus = parser.parse_known_args(override.words, argparse.Namespace(**values))
    except argparse.ArgumentError as error:
        raise Refusal([_wrong_value(error)]) from error
    _refuse_surplus(override, surplus, known)
    value = getattr(read, key)
    raise_errors(list(keys.range_findings(COMMAND_LINE, key, value)))
    return value


def _wrong_value(error: argparse.ArgumentError) -> Finding:
    """What TRL's parser cannot read, as a finding about the key that its error names."""
    option = error.argument_name.partition("/")[0]  # "--max_steps/--max-steps"
    return finding("ZR124", recipe_key=key_of(option), message=error, usage=USAGE)


def _refuse_surplus(override: Override, surplus: Sequence[str], known: Mapping[str, Any]) -> None:
    """Refuse the words that TRL's parser has left over: an unknown key, or words that belong to none."""
    if override.key and override.words[0] in surplus:
        raise Refusal(list(keys.key_findings(COMMAND_LINE, [override.key], known)))
    if surplus:
        raise refusal("ZR120", word=surplus[0], usage=USAGE)


def _as_text(value: Any, hint: Any) -> Any:
    """A number that YAML has read as text, where the key takes text alone: `run_name: 7`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and keys.accepted_types(hint) <= {"string", "null"}:
        return str(value)
    return value


def _is_null(key: str, text: str, hint: Any) -> bool:
    """Whether the text unsets the key. `--report_to none` is a value of its own: no callback at all."""
    names_null = text.lower() == "null" or (text.lower() == "none" and key != "report_to")
    return names_null and not keys.accepted_types(hint).isdisjoint({"null", "any"})


def _is_list(key: str, text: str, hint: Any) -> bool:
    """Whether the text is a list as a recipe writes it."""
    is_bracketed = text.startswith("[") and text.endswith("]")
    return is_bracketed and keys.takes_lists(key, hint)


def converted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the run reads them: mappings decoded, and files of the libraries and of this package found."""
    values = dict(values)
    values["datasets"] = list(map(_entry, values["datasets"]))
    for key in ("model_name_or_path", "dataset_name"):  # tiny_world/, for a recipe that the package brings
        found = at_hand(values[key] or "")
        if found.is_relative_to(FILES):
            values[key] = str(found)
    values["chat_template_path"] = _chat_template(values["chat_template_path"])
    for key in MAPPINGS:
        values[key] = _decoded(values[key])
    for key in NUMBER_MAPPINGS:
        if isinstance(values[key], dict):  # else a path, or nothing
            values[key] = _with_numbers(values[key])
    return values


def _entry(dataset: Any) -> dict[str, Any]:
    """An entry of `datasets` as a mapping: TRL's parser makes an object of each word of the command line."""
    return dataclasses.asdict(dataset) if dataclasses.is_dataclass(dataset) else dataset


def _chat_template(named: str | None) -> str | None:
    """The file of a template that TRL or this package brings under that name; else what is named."""
    if named is None or os.path.exists(named):
        return named
    for package, folder in (("trl", "chat_templates"), ("zero_recipes.data", "templates")):
        file = resources.files(package).joinpath(folder, f"{named}.jinja")
        if file.is_file():
            return str(file)
    return named


def _decoded(value: Any) -> Any:
    """A mapping that the command line gives as JSON or YAML, its texts as transformers reads them ("true" is true)."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    from transformers.training_args import _convert_str_dict  # noqa: PLC2701 - engine/ is above this package

    for read in (json.loads, yaml.safe_load):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            return _convert_str_dict(read(value))
    return value


def _with_numbers(value: Any) -> Any:
    """A mapping whose texts like "1e-5" are numbers, also those in lists and mappings inside.

    PyYAML reads a number with an exponent and without a dot as text. At the top level TRL's parser makes it a number.
    Texts of keys like `revision` and `name_or_path` stay.
    """
    if isinstance(value, str):
        return float(value) if EXPONENT.fullmatch(value) else value
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {}
    for key, item in value.items():
        parts = str(key).lower().split("_")
        is_text = not isinstance(item, dict) and not set(parts).isdisjoint(TEXT_PARTS)
        converted[key] = item if is_text else _with_numbers(item)
    return converted
